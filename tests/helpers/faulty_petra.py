"""`python -m helpers.faulty_petra` is `petra` with the fault in the environment variable PETRA_FAULT.

The processes that it starts have the fault as well.
"""

import sys
from collections.abc import Sequence

from helpers import faults
from petra.cli.main import main as petra_main


def main(arguments: Sequence[str] | None = None) -> int:
    """Install the fault, then run the command."""
    faults.install()
    return petra_main(arguments, module="helpers.faulty_petra")


if __name__ == "__main__":
    sys.exit(main())
