"""`python -m soak.faulty_petra` is `petra` with the fault of `soak.hooks`, if the environment asks for one."""

import os
import sys

from petra.cli.main import main

if __name__ == "__main__":
    if os.environ.get("PETRA_SOAK_HOOK"):
        from soak import hooks

        hooks.install()
    sys.exit(main(module="soak.faulty_petra"))
