"""Memory that tensors give back stays with the process. In processes of their own: it cannot be undone."""

import os
import subprocess
import sys

import pytest

from petra.execution import allocation

COUNT = """
import ctypes, resource, runpy, sys
keep_freed_memory = runpy.run_path(sys.argv[2])["keep_freed_memory"]  # without the time that torch takes
print(keep_freed_memory() if sys.argv[1] == "keep" else None)
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def turn():
    pieces = [ctypes.c_void_p(library.malloc(size)) for size in [24 << 20, 4 << 20] * 8]
    for piece, size in zip(pieces, [24 << 20, 4 << 20] * 8):
        ctypes.memset(piece, 1, size)
    for piece in pieces:
        library.free(piece)
turn()
before = pages()
turn()
print(pages() - before)
"""  # not with tensors, which have an allocator of their own on some machines


def run(what, **environment):
    clean = {name: value for name, value in os.environ.items() if name not in allocation._OWN_SETTINGS}
    command = [sys.executable, "-c", COUNT, what, allocation.__file__]
    found = subprocess.run(
        command, env={**clean, **environment}, capture_output=True, text=True, timeout=120, check=True
    )
    kept, pages = found.stdout.split()
    return kept, int(pages)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a malloc of another kind")
def test_pages_are_not_asked_for_again():
    kept, pages = run("keep")
    if kept == "False":
        pytest.skip("not glibc")
    assert pages < 100
    assert run("leave")[1] > 10000  # so that there is something to avoid


def test_settings_of_the_environment_stay():
    assert run("keep", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
