"""The `lb` command: arguments and environment in, exit status out. Nothing below reads either."""

import dataclasses
import os
import sys
from collections.abc import Sequence

from tandem.frontend.flags import warn_of_exposed_keys
from tandem.router.arguments import parse
from tandem.router.discovery_flags import in_pod
from tandem.router.launcher import run
from tandem.telemetry.log import configure, get_logger
from tandem.wire.errors import ConfigInvalid
from tandem.wire.keys import warn_of_weak_secret

log = get_logger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status: 0 after a signal, 2 for what cannot work."""
    try:
        given = parse(argv)
        secret = os.environ.get("TANDEM_CLUSTER_KEY", "")
        config = dataclasses.replace(
            given, cluster_secret=secret, kubernetes=in_pod(given.kubernetes, os.environ)
        )
        configure(config.log_level, config.log_format, role="router")
        for flag in config.ignored_flags:
            log.info("flag.ignored", flag=flag, reason="it has no meaning here")
        warn_of_exposed_keys(config.http)
        warn_of_weak_secret(secret)
        return run(config)
    except ConfigInvalid as error:
        sys.stderr.write(f"tandem lb: error: {error.for_operators}\n")
        return 2
