"""`python -m petra` is `petra`."""

import sys

from petra.cli.main import main

sys.exit(main())
