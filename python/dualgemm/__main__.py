"""``python -m dualgemm``: the command."""

import sys

from ._dualgemm import main

if __name__ == "__main__":
    sys.exit(main(["dualgemm", *sys.argv[1:]]))
