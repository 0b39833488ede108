"""`python -m ndcompile`, and so `torchrun -m ndcompile`: the command `ndcompile`."""

import sys

from ndcompile.cli import main

if __name__ == "__main__":
    sys.exit(main())
