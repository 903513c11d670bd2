"""Memory that tensors free stays with the process. Tested in subprocesses, because it cannot be undone."""

import os
import subprocess
import sys

import pytest

from petra.distributed import malloc

COUNT = """
import ctypes, resource, runpy, sys
keep_freed_memory = runpy.run_path(sys.argv[2])["keep_freed_memory"]  # without importing torch
print(keep_freed_memory() if sys.argv[1] == "keep" else None)
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def allocate_and_free():
    blocks = [ctypes.c_void_p(library.malloc(size)) for size in [24 << 20, 4 << 20] * 8]
    for block, size in zip(blocks, [24 << 20, 4 << 20] * 8):
        ctypes.memset(block, 1, size)
    for block in blocks:
        library.free(block)
allocate_and_free()
before = pages()
allocate_and_free()
print(pages() - before)
"""  # not with tensors: on some machines they have their own allocator


def run(what, **environment):
    clean = {name: value for name, value in os.environ.items() if name not in malloc._USER_SETTINGS}
    command = [sys.executable, "-c", COUNT, what, malloc.__file__]
    found = subprocess.run(
        command, env={**clean, **environment}, capture_output=True, text=True, timeout=120, check=True
    )
    kept, pages = found.stdout.split()
    return kept, int(pages)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="not glibc")
def test_freed_pages_are_reused():
    kept, pages = run("keep")
    if kept == "False":
        pytest.skip("not glibc")
    assert pages < 100
    assert run("leave")[1] > 10000  # without it, they are not


def test_settings_of_the_environment_take_precedence():
    assert run("keep", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
