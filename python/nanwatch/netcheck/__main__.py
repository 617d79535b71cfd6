"""`python -m nanwatch.netcheck`."""

from __future__ import annotations

import os
import sys

from .command import main

if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # End without the interpreter's own shutdown. That would end a thread that returns from a call into the store or
    # gloo inside C++, which aborts the process with SIGABRT after all was well: seen with four gloo ranks.
    os._exit(status)
