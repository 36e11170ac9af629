"""`tandem operator-key`: prints the key for requests that change the cluster."""

import os
import sys
from collections.abc import Sequence

from tandem.wire.command_line import Parser
from tandem.wire.errors import ConfigInvalid
from tandem.wire.keys import operator_key


def build_parser() -> Parser:
    """Return the parser."""
    return Parser(
        "tandem operator-key",
        description="Print the key that opens the routes that change a cluster (POST /nodes, DELETE /nodes/ID,\n"
        "POST /drain, POST /role, POST /update_weights_from_disk), derived from its secret in TANDEM_CLUSTER_KEY. It opens no link between nodes.",
        epilog='curl -H "Authorization: Bearer $(tandem operator-key)" -X DELETE ROUTER/nodes/HOST:PORT\n\n'
        "More: tandem docs membership",
    )


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    build_parser().parse_args(argv)
    key = operator_key(os.environ.get("TANDEM_CLUSTER_KEY", ""))
    if not key:
        raise ConfigInvalid(
            "TANDEM_CLUSTER_KEY is not set: set it to the cluster's secret; a cluster without one takes changes "
            "from its own machine, or with an API key",
            topic="membership#looking-adding-removing",
        )
    sys.stdout.write(f"{key}\n")
    return 0
