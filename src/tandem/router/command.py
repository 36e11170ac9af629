"""The `lb` command. Only this module reads the environment; everything below gets a `RouterConfig`."""

import dataclasses
import os
import sys
from collections.abc import Sequence

from tandem.frontend.options import warn_of_exposed_keys
from tandem.router.arguments import parse
from tandem.settings.flags import SettingInvalid, error_prefix
from tandem.telemetry.log import configure, get_logger
from tandem.wire.keys import warn_of_weak_secret

log = get_logger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status: 0 after a signal, 2 for an invalid configuration."""
    try:
        parsed = parse(argv)
        secret = os.environ.get("TANDEM_CLUSTER_KEY", "")
        config = dataclasses.replace(parsed, cluster_secret=secret)
        configure(config.log_level, config.log_format, role="router")
        for flag in config.ignored_flags:
            log.info("flag.ignored", flag=flag, reason="the flag has no effect here")
        warn_of_exposed_keys(config.http)
        warn_of_weak_secret(secret)
        # Imported late, so that a misspelt flag is reported at once.
        from tandem.router.workers.launcher import run

        return run(config)
    except SettingInvalid as error:
        sys.stderr.write(f"{error_prefix('tandem lb')}{error.for_operators}\n")
        return 2
