"""`python -m zero1_helpers` is `zero1`."""

import os
import sys

from zero1_helpers.cli import INTERRUPTED, main


def run() -> None:
    status = main()
    if status == INTERRUPTED:
        os._exit(status)  # who presses Ctrl-C does not wait until torch is taken down
    sys.exit(status)


if __name__ == "__main__":
    run()
