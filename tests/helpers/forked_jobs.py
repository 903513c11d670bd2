"""Jobs of `petra train --ranks` and of torchrun whose processes have everything imported already.

The process that starts them must have few threads: they are forked from it.
"""

import multiprocessing
import os
import signal
import subprocess
import sys


class ForkFromHere:
    """Stands for `petra.distributed.fork_server.ForkServer`; processes are forked from this one."""

    def __init__(self, module, arguments):
        self._arguments = arguments

    def start(self, variables):
        return ForkedProcess(self._arguments, variables)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


class ForkedProcess:
    """Stands for `subprocess.Popen`."""

    def __init__(self, arguments, env):
        self._process = multiprocessing.get_context("fork").Process(target=_main, args=(arguments, env))
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("petra", timeout)

    def kill(self):
        self._process.kill()

    def send_signal(self, number):
        os.kill(self.pid, number)


def _main(arguments, variables):
    from helpers import faulty_petra

    os.setsid()
    os.environ.update(variables)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # not those of the launcher
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(faulty_petra.main(arguments))


def torchrun(*arguments):
    """Run torchrun in this process; it forks the processes of the job."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    def start(args, env, stdout, stderr, start_new_session):
        assert stdout is stderr is None
        return ForkedProcess(args[args.index("-m") + 2 :], env)

    subprocess_handler.Popen = start
    run.main(arguments)
