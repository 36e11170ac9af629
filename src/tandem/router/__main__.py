"""`python -m tandem.router ...` is `tandem lb ...`."""

import sys

from tandem.router.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
