"""Addresses at which nodes and engines publish KV events."""

from functools import partial
from typing import Annotated

import msgspec

from tandem.settings.flags import Flag
from tandem.wire.errors import ConfigInvalid


def checked_endpoint(flag: str, text: str) -> str:
    """Return a ZMQ endpoint; raise `ConfigInvalid` if it is none of TCP."""
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    if text and not (text.startswith("tcp://") and host and port.isdigit() and int(port) < 65536):
        raise ConfigInvalid(f"{flag} {text} is not an endpoint: use one such as tcp://*:5557")
    return text


class EngineEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Where unmodified engines publish; empty: nowhere. The host `*` is each engine's."""

    endpoint: Annotated[
        str,
        Flag(
            "--kv-events-endpoint",
            group="unmodified engines",
            metavar="ENDPOINT",
            help="where engines publish KV events, as in their --kv-events-config, such as tcp://*:5557; * is the host "
            "of each engine (default: assume that an engine caches what it was sent)",
            parse=partial(checked_endpoint, "--kv-events-endpoint"),
        ),
    ] = ""
    replay_endpoint: Annotated[
        str,
        Flag(
            "--kv-events-replay-endpoint",
            metavar="ENDPOINT",
            help="their replay_endpoint, such as tcp://*:5558; without it, a lost event empties the known cache",
            parse=partial(checked_endpoint, "--kv-events-replay-endpoint"),
        ),
    ] = ""

    def __post_init__(self) -> None:
        if self.replay_endpoint and not self.endpoint:
            raise ConfigInvalid(
                "--kv-events-replay-endpoint needs --kv-events-endpoint; set it too",
                topic="docs/kv-events.md",
            )

    def on(self, host: str) -> "EngineEvents":
        """Return the endpoints of the engine on a host."""
        bracketed = f"[{host}]" if ":" in host else host
        return EngineEvents(
            endpoint=self.endpoint.replace("*", bracketed),
            replay_endpoint=self.replay_endpoint.replace("*", bracketed),
        )
