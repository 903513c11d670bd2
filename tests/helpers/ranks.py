"""Starts one process per rank."""

import json
import time

from torch.distributed import TCPStore

from helpers import fork_server, rank_worker


def run_ranks(world, cases, folder, limit=150):
    """Start one process a rank; return what each wrote. Nothing hangs: all are killed when time is up."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [fork_server.start(rank_worker.main, rank, world, store.port, cases, folder) for rank in range(world)]
    try:
        end = time.monotonic() + limit
        for process in ranks:
            process.join(max(1.0, end - time.monotonic()))
    finally:
        for process in ranks:
            process.kill()
            process.join()
    errors = [(folder / f"rank{rank}.log").read_text() for rank in range(world)]
    assert [process.exitcode for process in ranks] == [0] * world, "\n".join(errors)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]
