"""`tandem operator-key`: prints the bearer key for administrative requests."""

import os
import sys
from collections.abc import Sequence

from tandem.settings.parser import Parser
from tandem.wire.errors import ConfigInvalid
from tandem.wire.keys import operator_key


def build_parser() -> Parser:
    """Return the parser."""
    return Parser(
        "tandem operator-key",
        description="Print the bearer key for administrative requests (POST /nodes, DELETE /nodes/ID, POST /drain,\n"
        "POST /role, POST /update_weights_from_disk). It is derived from the cluster's secret in\n"
        "TANDEM_CLUSTER_KEY and does not open links between nodes.",
        epilog='curl -H "Authorization: Bearer $(tandem operator-key)" -X DELETE ROUTER/nodes/HOST:PORT\n\n'
        "More: docs/membership.md",
    )


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    build_parser().parse_args(argv)
    key = operator_key(os.environ.get("TANDEM_CLUSTER_KEY", ""))
    if not key:
        raise ConfigInvalid(
            "TANDEM_CLUSTER_KEY is not set: set it to the cluster's secret; without a secret, nodes and routers accept "
            "administrative requests from their own machine, or with an API key",
            topic="docs/membership.md#looking-adding-removing",
        )
    sys.stdout.write(f"{key}\n")
    return 0
