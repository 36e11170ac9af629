"""`python -m tandem.prefill`, the same as `tandem prefill`."""

import sys

from tandem.prefill.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
