"""Jobs of `petra train --ranks` whose processes have everything imported already.

The process that starts them must have few threads: they are forked from it.
"""

import multiprocessing
import os
import signal
import sys
from types import SimpleNamespace


class ForkedProcess:
    """Stands for `subprocess.Popen`, for a command `python -m module arguments…`."""

    def __init__(self, command, env, start_new_session):
        self._process = multiprocessing.get_context("fork").Process(target=_main, args=(command[3:], env))
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        return self._process.exitcode

    def wait(self):
        self._process.join()

    def kill(self):
        self._process.kill()

    def send_signal(self, number):
        os.kill(self.pid, number)


def _main(arguments, variables):
    from helpers import faulty_petra

    os.environ.update(variables)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not those of the launcher
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(faulty_petra.main(arguments))


FORKED = SimpleNamespace(Popen=ForkedProcess)
