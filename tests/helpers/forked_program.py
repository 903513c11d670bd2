"""Stands for a rank: `python -m helpers.forked_program FOLDER` writes what it is into a file, and waits or ends."""

import json
import os
import sys
import threading
import time
from pathlib import Path

BEFORE = sorted(sys.modules)


def main():
    number = os.environ["RANK"]
    found = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "imported": [name for name in ("torch", "torch._dynamo", "petra.cli.train") if name in BEFORE],
        "leads_session": os.getsid(0) == os.getpid(),
        "main": sys.modules["__main__"].__spec__.name,
        "name": Path("/proc/self/comm").read_text().strip(),
        "parent": os.getppid(),
        "pid": os.getpid(),
        "threads": threading.active_count(),
    }
    file = Path(sys.argv[1], number)
    file.with_suffix(".tmp").write_text(json.dumps(found))
    file.with_suffix(".tmp").rename(file)
    if os.environ["DO"] == "wait":
        time.sleep(100)
    sys.exit(int(os.environ["DO"]))


if __name__ == "__main__":
    main()
