"""The cluster's secret from a file, as service managers and containers hand secrets to programs."""

import os
from collections.abc import MutableMapping
from pathlib import Path

from tandem.wire.errors import ConfigInvalid

KEY = "TANDEM_CLUSTER_KEY"
FILE = "TANDEM_CLUSTER_KEY_FILE"


def take_key_file(environment: MutableMapping[str, str] = os.environ) -> None:
    """Move what the file of TANDEM_CLUSTER_KEY_FILE holds into TANDEM_CLUSTER_KEY, where all commands read it.

    Raises:
        ConfigInvalid: It cannot be read or is empty, or both are set.
    """
    if not (name := environment.pop(FILE, "")):
        return
    if environment.get(KEY):
        raise ConfigInvalid(f"{KEY} and {FILE} are both set: leave one of them out")
    try:
        secret = Path(name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigInvalid(f"{FILE} is {name}, which cannot be read: {error}") from error
    if not secret:
        raise ConfigInvalid(
            f"{FILE} is {name}, which is empty: fill it with `openssl rand -hex 32`"
        )
    environment[KEY] = secret
