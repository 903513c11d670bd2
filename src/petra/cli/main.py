"""The command line: `petra COMMAND …`, one-line errors, exit code 2 for bad input and 1 for failed runs."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import petra
from petra.cli import compare, evaluate, fidelity, generate, lists, memory, plan, plot, schedule, train
from petra.execution import Diverged
from petra.execution.job import JobFailed, Spoken, first, job_name, met, processes
from petra.names import unknown
from petra.training.run import Interrupted

PATIENCE = 10.0
"""Seconds that the first process has to say what all of them have run into."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if action.type is Path and not arg_string:  # a variable of the shell that is not set, which would be "here"
            raise argparse.ArgumentError(action, "expected a path, not an empty one")
        return super()._get_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            kind = action.metavar.lower() if isinstance(action.metavar, str) else "choice"
            raise argparse.ArgumentError(action, str(unknown(kind, str(value), map(str, action.choices))))


class _Command(_Parser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse what is not known here, for the parser of all commands would point to its own help."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            known = [name.lstrip("-") for name in self._option_string_actions]
            close = get_close_matches(rest[0].partition("=")[0].lstrip("-"), known, n=1, cutoff=0.75)
            hint = f": did you mean --{close[0]}?" if close else ""
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return found, rest


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(
        prog="petra",
        description="Trains reversible neural networks in parallel, and compares the ways to do it.",
        epilog="Every command explains itself: petra train --help. PETRA_TRACEBACK=1 shows where an error came from.",
    )
    parser.add_argument("--version", action="version", version=f"petra {petra.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Command)
    for command in (train, evaluate, generate, compare, fidelity, plot, memory, plan, schedule, lists):
        command.add_to(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = build_parser().parse_args(arguments)
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = options.run(options)
        sys.stdout.flush()
        return int(code or 0)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        return _fail(error, 2)
    except (Diverged, JobFailed) as error:
        return _fail(error, 1)
    except Spoken as elsewhere:
        return _leave(elsewhere.code)
    except (Interrupted, KeyboardInterrupt) as stopped:
        return _fail(stopped, 130, "")
    except Exception as error:
        return _fail(error, 1, f"error: {type(error).__name__}: ")
    return 0


def _fail(error: BaseException, code: int, word: str = "error: ") -> int:
    if os.environ.get("PETRA_TRACEBACK"):
        raise error
    text = next(iter(str(error).splitlines()), "stopped")
    # Before they meet, all processes find the same fault.
    if _alone() or met() or first() or (code != 130 and _outlives_the_first()):
        print(f"petra: {word}{text}", file=sys.stderr)
    return _leave(code)


def _outlives_the_first() -> bool:
    """Whether the first process has not failed too: if it does, torchrun ends this one while it waits.

    Were this one to leave first, torchrun would end the other before it could say why.
    """
    if job_name() is None:
        return False
    time.sleep(PATIENCE)
    return True


def _alone() -> bool:
    try:
        return processes() == 1
    except ValueError:
        return True


def _leave(code: int) -> int:
    if not _alone():  # connections to ranks that are gone would keep the interpreter from ending
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
