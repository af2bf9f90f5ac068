"""`python -m zero1_helpers` is `zero1`."""

import sys

from zero1_helpers.cli import main

if __name__ == "__main__":
    sys.exit(main())
