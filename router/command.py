"""The `lb` command: arguments and environment in, exit status out. Nothing below reads either."""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence

from tandem.frontend.options import warn_of_exposed_keys
from tandem.router.arguments import parse
from tandem.router.config import KubernetesTarget
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
        from tandem.router.launcher import (
            run,
        )  # a misspelt flag need not wait for a server's imports

        return run(config)
    except ConfigInvalid as error:
        sys.stderr.write(f"tandem lb: error: {error.for_operators}\n")
        return 2


def in_pod(
    target: KubernetesTarget | None, environment: Mapping[str, str]
) -> KubernetesTarget | None:
    """Return the target with the API that a pod's environment names, unless one was given.

    Raises:
        ConfigInvalid: There is none.
    """
    if target is None or target.api_url:
        return target
    host, port = (environment.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    if not host:
        raise ConfigInvalid(
            "--discover-kubernetes: this is no pod (KUBERNETES_SERVICE_HOST is not set): give "
            "--kubernetes-api, such as that of `kubectl proxy`",
            topic="membership#kubernetes",
        )
    host = f"[{host}]" if ":" in host else host
    return dataclasses.replace(target, api_url=f"https://{host}:{port or 443}")
