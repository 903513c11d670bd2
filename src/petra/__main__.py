"""`python -m petra` is `petra`."""

import sys

from petra.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
