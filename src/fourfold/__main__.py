"""`python -m fourfold`, so that torchrun can start a command on every rank."""

import sys

from fourfold.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
