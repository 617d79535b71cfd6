"""`python -m nanwatch.netcheck`."""

from __future__ import annotations

import os
import sys

from .command import main

if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by the interpreter's own end: a thread that comes back from a call into the store or gloo just then is ended
    # inside C++, and takes the process down with SIGABRT after all was well: seen with four gloo ranks.
    os._exit(status)
