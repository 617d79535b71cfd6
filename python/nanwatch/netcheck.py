"""The command `torchrun -m nanwatch.netcheck`, which is in `ranks/netcheck.py`."""

import sys

from .ranks.netcheck import main

if __name__ == "__main__":
    main(sys.argv[1:])
