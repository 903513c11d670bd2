"""The command line: `petra COMMAND …`, one-line errors, exit code 2 for bad input and 1 for failed runs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from petra.cli.parser import build_parser

PATIENCE = 10.0
"""Seconds that the first process has to report an error that all processes found."""


def main(arguments: Sequence[str] | None = None, *, module: str = "petra") -> int:
    """Run one command.

    Args:
        arguments: The arguments after `petra`; None means those of the process.
        module: The module that `petra train --ranks N` starts its processes with. A program that registers networks
            and then calls this function gives its own module, so that the ranks register them as well.

    Returns:
        The exit code.
    """
    # PyTorch reads this when it is imported. Warnings of its C++ code, such as the profiler's, do not help users.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    if not arguments:
        parser.print_help()
        return 0
    try:
        options = parser.parse_args(arguments)  # it imports the command, which takes seconds
        options.arguments, options.module = arguments, module
        code = options.run(options)
        sys.stdout.flush()
        return int(code or 0)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        return _fail(error, 2)
    except (Exception, KeyboardInterrupt) as error:
        return _fail_while_running(error)


def _fail_while_running(error: BaseException) -> int:
    # Imported here, because these modules import PyTorch.
    from petra.data.workers import describe_lost_worker
    from petra.distributed.job import JobFailed, ReportedElsewhere
    from petra.pipeline import Diverged
    from petra.trainer.interrupts import Interrupted

    if isinstance(error, ReportedElsewhere):
        return _leave(error.code)
    if (lost := describe_lost_worker(error)) is not None:
        return _fail(JobFailed(lost), 1)
    if isinstance(error, Interrupted | KeyboardInterrupt):
        return _fail(error, 130, "")
    return _fail(error, 1, "error: " if isinstance(error, Diverged | JobFailed) else f"error: {type(error).__name__}: ")


def _fail(error: BaseException, code: int, prefix: str = "error: ") -> int:
    if os.environ.get("PETRA_TRACEBACK"):
        raise error
    from petra.distributed.job import has_joined, is_first_process
    from petra.distributed.membership import is_replacement

    text = next(iter(str(error).splitlines()), "stopped")
    # Before the processes have met, all of them find the same error.
    reports = _single_process() or has_joined() or is_first_process() or is_replacement()
    if reports or (code != 130 and _first_process_survives()):
        with suppress(OSError):  # nobody can read it
            print(f"petra: {prefix}{text}", file=sys.stderr)
    return _leave(code)


def _first_process_survives() -> bool:
    """Wait for the first process to report; if it fails, torchrun terminates this process.

    If this process exited first, torchrun would terminate the first process before it could report.
    """
    from petra.distributed.job import job_name

    if job_name() is None:
        return False
    time.sleep(PATIENCE)
    return True


def _single_process() -> bool:
    from petra.distributed.job import world_size

    try:
        return world_size() == 1
    except ValueError:
        return True


def _leave(code: int) -> int:
    if not _single_process():  # connections to ranks that are gone would keep the interpreter from ending
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    return code
