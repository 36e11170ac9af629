"""`python -m tandem.decode`, the same as `tandem decode`."""

import sys

from tandem.decode.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
