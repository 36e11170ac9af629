"""Options of engines that do not implement the node protocol, for `tandem lb` and `tandem adopt`."""

from functools import partial
from typing import Annotated, Literal

import msgspec

from tandem.settings.flags import Flag
from tandem.wire.errors import ConfigInvalid
from tandem.wire.events.publisher import checked_endpoint


class StockOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What engines do not report of themselves.

    Attributes:
        kv_events_endpoint: Where they publish KV events; empty: nowhere. The host `*` is each engine's.
        kv_replay_endpoint: Where they replay them; empty: nowhere.
    """

    kv_connector: Annotated[
        Literal["nixl", "mooncake"],
        Flag(
            "--kv-connector",
            group="unmodified engines",
            help="connector of vLLM's engines: NixlConnector, or one that takes MooncakeConnector's transfers",
        ),
    ] = "nixl"
    kv_events_endpoint: Annotated[
        str,
        Flag(
            "--kv-events-endpoint",
            metavar="ENDPOINT",
            help="where engines publish KV events, as in their --kv-events-config, such as tcp://*:5557; * is the host "
            "of each engine (default: assume that an engine caches what it was sent)",
            parse=partial(checked_endpoint, "--kv-events-endpoint"),
        ),
    ] = ""
    kv_replay_endpoint: Annotated[
        str,
        Flag(
            "--kv-events-replay-endpoint",
            metavar="ENDPOINT",
            help="their replay_endpoint, such as tcp://*:5558; without it, a lost event empties the known cache",
            parse=partial(checked_endpoint, "--kv-events-replay-endpoint"),
        ),
    ] = ""

    def __post_init__(self) -> None:
        if self.kv_replay_endpoint and not self.kv_events_endpoint:
            raise ConfigInvalid(
                "--kv-events-replay-endpoint needs --kv-events-endpoint; set it too",
                topic="docs/kv-events.md",
            )

    def events_of(self, host: str) -> tuple[str, str]:
        """Return the two endpoints of the engine on a host."""
        bracketed = f"[{host}]" if ":" in host else host
        return (
            self.kv_events_endpoint.replace("*", bracketed),
            self.kv_replay_endpoint.replace("*", bracketed),
        )
