"""Throughput of pipelines over emulated slow links, divided by that over unthrottled ones.

    python benchmarks/slow_links/run.py
    python benchmarks/slow_links/run.py --smoke

Each rank runs in a network namespace of its own. The links between them are those of `tc netem`, or, where the kernel
has no netem, of a process that passes the packets of TUN devices with the same delay and rate. Both need Linux,
iproute2 and root; otherwise the benchmark is skipped with a message. TCP and gloo are the real ones.

By default, the work of a stage is a stand-in, which waits for --compute-ms without using a core, so that ratios do not
depend on the load of the machine. --real trains a RevNet instead. Schedules: lock-step and low-staleness; adapted has
the numbers in flight that `petra plan --latency --bandwidth` chooses; 1f1b flushes after every update.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from itertools import product
from math import inf
from pathlib import Path

from network import DEVICE, Link, Network, Unavailable, emulation
from worker import COMM_DTYPES, Work

from petra.formatting import mebibytes, render

SCHEDULES = ("lock-step", "low-staleness", "adapted", "1f1b")
PORT = 29511
SMOKE = {"compute_ms": 20.0, "message_mib": 0.1, "delays": [20.0], "rates": [200.0], "ticks": 4, "rounds": 1}


def measure(work: Work, link: Link, kind: str, limit: float) -> list[dict]:
    """Train all pipelines over one kind of link; return the results of all ranks."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, Network(work.ranks, link, kind) as network:
        worker = str(Path(__file__).with_name("worker.py"))
        address = f"tcp://{network.address(0)}:{PORT}"
        given = json.dumps(asdict(work))
        ranks = [
            subprocess.Popen(
                network.command(rank, [sys.executable, worker, address, str(rank), str(limit), folder, given]),
                env=environment,
                stderr=(Path(folder) / f"{rank}.error").open("w"),
            )
            for rank in range(work.ranks)
        ]
        try:
            deadline = time.monotonic() + limit
            while any(process.poll() is None for process in ranks):
                if time.monotonic() > deadline or any(process.poll() for process in ranks):
                    break
                time.sleep(0.1)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(process.returncode for process in ranks):
            errors = [Path(folder, f"{rank}.error").read_text()[-3000:] for rank in range(work.ranks)]
            raise SystemExit("\n".join([f"a rank failed or took longer than --limit {limit:g} s over {link}", *errors]))
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(work.ranks)]


def rows_of(link: Link, found: list[dict]) -> list[dict]:
    """Return one row per pipeline; a window is as long as that of its slowest rank."""
    rows = []
    for pipelines in zip(*(rank["pipelines"] for rank in found), strict=True):
        windows = [max(window) for window in zip(*(p["windows"] for p in pipelines), strict=True)]
        row = {key: pipelines[0][key] for key in ("schedule", "dtype", "in_flight", "predicted")}
        sizes = {key: pipelines[0][key] for key in ("up_bytes", "down_bytes")}
        seconds = statistics.median(windows)
        rows.append({"link": str(link), **row, **sizes, "seconds": seconds, "windows": windows})
    return rows


def report(rows: list[dict]) -> str:
    """Return the table. Ratios are to the fastest pipeline over unthrottled links."""
    table = []
    for row in rows:
        up, down = max(row["up_bytes"]), max(row["down_bytes"])
        table.append(
            [
                row["link"],
                row["schedule"],
                row["dtype"],
                ",".join(map(str, row["in_flight"])),
                f"{mebibytes(up)} / {mebibytes(down)}",
                f"{1e3 * row['seconds']:.0f} ms",
                f"{row['throughput']:.2f}",
                "" if row["predicted"] is None else f"{row['predicted_throughput']:.2f}",
            ]
        )
    header = [
        "links",
        "schedule",
        "dtype",
        "in flight",
        "message / back",
        "per micro-batch",
        "of unthrottled",
        "predicted",
    ]
    return render(header, table, left=5)


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny, to see that it works; stores nothing")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--compute-ms", type=float, default=200.0, help="of a forward and backward of the stand-in")
    parser.add_argument("--message-mib", type=float, default=2.0, help="streams of the stand-in in float32")
    parser.add_argument("--real", action="store_true", help="train a RevNet of equal blocks instead of the stand-in")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--width", type=int, default=16, help="of the RevNet")
    parser.add_argument("--blocks", type=int, default=4, help="of the RevNet, on each rank")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per update")
    parser.add_argument("--delays", type=numbers, default=[1.0, 10.0, 50.0], help="ms (default 1,10,50)")
    parser.add_argument("--rates", type=numbers, default=[1000.0, 200.0, 80.0], help="Mb/s (default 1000,200,80)")
    parser.add_argument("--schedules", default="lock-step,adapted", help=f"of {', '.join(SCHEDULES)}")
    parser.add_argument("--dtypes", nargs="+", default=["none", "bf16"], help=f"of messages: {', '.join(COMM_DTYPES)}")
    parser.add_argument("--ticks", type=int, default=12, help="micro-batches in a window")
    parser.add_argument("--rounds", type=int, default=3, help="windows")
    parser.add_argument("--limit", type=float, default=300, help="seconds for all pipelines over one kind of link")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args(given)
    # Namespaces outlive the process that makes them, unless it removes them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.smoke:
        vars(options).update(SMOKE)
    schedules, dtypes = options.schedules.split(","), options.dtypes
    for chosen, known, flag in ((schedules, SCHEDULES, "--schedules"), (dtypes, COMM_DTYPES, "--dtypes")):
        for name in chosen:
            if name not in known:
                raise SystemExit(f"{flag} has {name!r}: choose from {', '.join(known)}")
    try:
        kind = emulation()
    except Unavailable as error:
        print(f"skipped: links cannot be emulated here, because {error}")
        return
    work = Work(
        ranks=options.ranks,
        compute_ms=None if options.real else options.compute_ms,
        message_mib=options.message_mib,
        batch_size=options.batch_size,
        width=options.width,
        blocks=options.blocks,
        accumulate=options.accumulate,
        pipelines=[(schedule, dtype) for schedule in schedules for dtype in dtypes],
        ticks=options.ticks,
        rounds=options.rounds,
        latency=0.0,
        bandwidth=inf,
        seconds=None,
    )
    found = measure(work, Link(), kind, options.limit)
    rows = [{**row, "predicted": None} for row in rows_of(Link(), found)]  # others are relative to these
    fastest = min(row["seconds"] for row in rows)
    print(f"unthrottled: {1e3 * fastest:.0f} ms per micro-batch ({kind}, {options.ranks} ranks)", flush=True)
    for rate, delay in product(options.rates, options.delays):
        link = Link(delay / 1e3, rate * 1e6)
        slow = replace(work, latency=link.delay, bandwidth=link.rate / 8, seconds=fastest)
        rows += rows_of(link, measure(slow, link, kind, options.limit))
        for row in rows[-len(work.pipelines) :]:
            print(
                f"{link}, {row['schedule']}, {row['dtype']}: {1e3 * row['seconds']:.0f} ms", file=sys.stderr, flush=True
            )
    for row in rows:
        row["throughput"] = fastest / row["seconds"]
        row["predicted_throughput"] = None if row["predicted"] is None else fastest / row["predicted"]
    print(report(rows))
    if not options.smoke:
        where = found[0]["environment"]
        options.out.mkdir(exist_ok=True)
        what = "revnet" if options.real else "stand-in"
        name = f"{where['machine']}-{where['cores']}-cores-{what}-{options.ranks}-ranks.json"
        asked = {key: value for key, value in vars(options).items() if key != "out"}
        result = {"emulation": kind, **asked, "environment": where, "rows": rows}
        (options.out / name).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
