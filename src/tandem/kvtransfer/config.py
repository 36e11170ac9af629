"""The options of the KV transfer: flags of a node, and keys of vLLM's `kv_connector_extra_config`."""

from typing import Annotated, Literal

import msgspec

from tandem.kvtransfer.agents.receiver import ReceiverTimeouts
from tandem.kvtransfer.agents.sender import SenderTimeouts
from tandem.kvtransfer.checksum import Verify
from tandem.kvtransfer.transports.base import TransportConfig
from tandem.settings.flags import Flag
from tandem.wire.channel import Heartbeat
from tandem.wire.errors import ConfigInvalid

# Bounds of the timeouts. Below the minimum, healthy peers would time out.
MIN_TRANSFER_TIMEOUT_S = 0.1
MAX_TRANSFER_TIMEOUT_S = 86_400.0


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the KV transfer.

    As JSON, the fields have the names of their flags, with underscores; `vllm serve` takes them by these names.

    Attributes:
        bootstrap_port: 8998 is SGLang's default.
        grant_timeout_s: Time that prefill waits for a grant, including decode's queue for pages. Losing an edge
            worker ends its halves immediately; this timeout ends halves that no edge worker tracks. 300 s is SGLang's
            default.
        early_grant_timeout_s: Time that a grant waits for its request; its pages are idle meanwhile.
        landed_timeout_s: Time that decode waits for granted pages to land, including prefill's queue.
        verify: Whether both ends hash every pushed byte, which detects any single wrong bit. An end with `off`, or with
            `auto` and a pool on a GPU, neither sends checksums nor compares them.
    """

    backend: Annotated[
        str,
        Flag(
            "--transfer-backend",
            "--disaggregation-transfer-backend",
            group="transfer",
            metavar="NAME",
            help="transport of KV: auto, shm, tcp, cuda_ipc, nixl, ucx, mooncake, nccl; see "
            "docs/transports.md",
        ),
    ] = msgspec.field(default="auto", name="transfer_backend")
    interface: Annotated[
        str,
        Flag(
            "--transfer-interface",
            metavar="NAME",
            help="network interface of tcp, by its IPv4 or IPv6 address as in --host",
        ),
    ] = msgspec.field(default="", name="transfer_interface")
    devices: Annotated[
        str,
        Flag(
            "--transfer-device",
            "--disaggregation-ib-device",
            metavar="NAMES",
            help="RDMA devices of nixl, ucx and mooncake, such as mlx5_0:1: one for all ranks, or as many for each "
            "rank, separated by commas in the order of the ranks",
        ),
    ] = msgspec.field(default="", name="transfer_device")
    port: Annotated[
        int,
        Flag(
            "--transfer-port",
            metavar="PORT",
            ge=0,
            le=65535,
            help="on decode: port on which tcp receives KV; further ranks use the ports after it; 0: any free port",
        ),
    ] = msgspec.field(default=0, name="transfer_port")
    bootstrap_port: Annotated[
        int,
        Flag(
            "--bootstrap-port",
            "--disaggregation-bootstrap-port",
            metavar="PORT",
            ge=0,
            le=65535,
            help="on prefill: port for grants; on decode: default port of requests that name none",
        ),
    ] = 8998
    grant_timeout_s: Annotated[
        float,
        Flag(
            "--grant-timeout-s",
            "--grant-timeout",
            metavar="SECONDS",
            ge=MIN_TRANSFER_TIMEOUT_S,
            le=MAX_TRANSFER_TIMEOUT_S,
            help="on prefill: time that a request waits for decode to grant pages",
        ),
    ] = 300.0
    early_grant_timeout_s: Annotated[
        float,
        Flag(
            "--early-grant-timeout-s",
            metavar="SECONDS",
            ge=MIN_TRANSFER_TIMEOUT_S,
            le=MAX_TRANSFER_TIMEOUT_S,
            help="on prefill: time that a grant waits for its request, while its pages on decode are idle",
        ),
    ] = 30.0
    landed_timeout_s: Annotated[
        float,
        Flag(
            "--landed-timeout-s",
            metavar="SECONDS",
            ge=MIN_TRANSFER_TIMEOUT_S,
            le=MAX_TRANSFER_TIMEOUT_S,
            help="on decode: time from a grant until its KV has landed, including prefill's queue",
        ),
    ] = 600.0
    push_granularity: Annotated[
        Literal["layer", "chunk"],
        Flag(
            "--push-granularity",
            help="on prefill: push KV as layers are computed, or after each chunk of a prompt",
        ),
    ] = "layer"
    verify: Annotated[
        Verify,
        Flag(
            "--verify-kv",
            help="whether both sides hash every byte of the pages; auto: unless the pool is on a GPU",
            aliases={"--no-kv-checksum": "off"},
        ),
    ] = msgspec.field(default="auto", name="verify_kv")

    def of_sender(self, heartbeat: Heartbeat) -> SenderTimeouts:
        """Return the time limits of prefill's agent, whichever engine runs it."""
        return SenderTimeouts(
            grant_s=self.grant_timeout_s,
            early_grant_s=self.early_grant_timeout_s,
            heartbeat=heartbeat,
        )

    def of_receiver(self, heartbeat: Heartbeat) -> ReceiverTimeouts:
        """Return the time limits of decode's agent, whichever engine runs it."""
        return ReceiverTimeouts(landed_s=self.landed_timeout_s, heartbeat=heartbeat)

    def of_transports(
        self, host: str, tp_rank: int = 0, tp_size: int = 1, stage: int = 0
    ) -> TransportConfig:
        """Return the part that transports need, for a rank of a node that listens on `host`.

        `stage`: pipeline stage, whose ranks use the ports after those of earlier stages.

        Raises:
            ConfigInvalid: The devices cannot be divided among the ranks.
        """
        names = self.devices.split(",") if self.devices else []
        if len(names) > 1:
            share, rest = divmod(len(names), tp_size)
            if rest or not share:
                raise ConfigInvalid(
                    f"--transfer-device names {len(names)} devices for {tp_size} ranks; name one, or as many for each rank",
                    topic="docs/transports.md#flags",
                )
            names = names[tp_rank * share : (tp_rank + 1) * share]
        port = self.port and self.port + stage * tp_size + tp_rank
        return TransportConfig(host=host, interface=self.interface, devices=tuple(names), port=port)
