"""`python -m unison` is the command `unison`."""

import sys

from unison.cli import main

if __name__ == "__main__":
    sys.exit(main())
