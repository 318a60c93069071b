"""`python -m twinplane.cli` does the same as the `twinplane` script."""

from __future__ import annotations

import sys

from twinplane.cli import main

if __name__ == "__main__":
    sys.exit(main())
