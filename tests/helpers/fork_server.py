"""Processes that have everything imported already, so that each starts in a moment and not in seconds."""

import multiprocessing

PRELOADED = [
    "petra.cli.train",
    "petra.cli.compare",
    "petra.cli.fidelity",
    "petra.models",
    "torch._dynamo",
    "pytest",
]


def context():
    """For `multiprocessing`; the first to start a process in it starts the server that all others are forked from."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def start(target, *arguments):
    process = context().Process(target=target, args=arguments)
    process.start()
    return process
