"""A process that looks like `petra train` from outside, and starts in a moment. `--wrong WHAT` makes it misbehave.

With `--until-fault`, an attempt with a fault waits for it after `FAULT_AT` checkpoints, so that it does not end before.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

STEPS, FAULT_AT = 12, 3
LIMIT = 20.0


def main(arguments):
    folder = Path(arguments[arguments.index("--out") + 1])
    wrong = arguments[arguments.index("--wrong") + 1] if "--wrong" in arguments else ""
    latest = folder / "checkpoint" / "latest.json"
    latest.parent.mkdir(parents=True, exist_ok=True)
    done = int(json.loads(latest.read_text())["name"]) if latest.exists() else 0
    resumed = done > 0
    stop = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.append(1))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    if wrong == "hang" and resumed:
        time.sleep(100)
    waits = "--until-fault" in arguments and "-fault" in os.environ["PETRA_SOAK_ATTEMPT"]
    while done < STEPS:
        time.sleep(0.03)
        done += 1
        try:
            temporary = latest.with_name("latest.json.tmp")
            temporary.write_text(json.dumps({"name": f"{done:06d}"}))
            temporary.replace(latest)
        except OSError as error:
            temporary.unlink()
            print(f"petra: error: the checkpoint could not be written ({error.strerror})")
            return 2
        if waits and done == FAULT_AT:
            wait_for_fault(stop)
        if stop and wrong == "traceback":
            raise KeyError
        if stop and wrong == "process":
            subprocess.Popen(["sleep", "100"], start_new_session=True)
        if stop and wrong == "temporary":
            (Path(os.environ["TMPDIR"]) / "left").touch()
        if stop:
            print("petra: stopped in epoch 1; continue with --resume")
            return 130
    (folder / "weights.safetensors").write_text("other" if wrong == "weights" and resumed else "weights")
    if wrong == "file" and resumed:
        (folder / "weights.safetensors.tmp").touch()
    return 0


def wait_for_fault(stop):
    """Wait for a signal, or for a limit to the size of files."""
    continued = []
    signal.signal(signal.SIGCONT, lambda *_: continued.append(1))
    before, deadline = resource.getrlimit(resource.RLIMIT_FSIZE), time.monotonic() + LIMIT
    while not (stop or continued) and time.monotonic() < deadline:
        if resource.getrlimit(resource.RLIMIT_FSIZE) != before:
            break
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
