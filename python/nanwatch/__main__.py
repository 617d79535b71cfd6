"""`nanwatch`: a command by its name, and without one the doctor."""

import sys

from .cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
