"""`python -m jetspec` is the command `jetspec`."""

from __future__ import annotations

import sys

from jetspec.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
