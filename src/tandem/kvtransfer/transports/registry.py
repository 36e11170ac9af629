"""The built-in and installed transports, and the choice of one that works between two ends."""

from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.threads import transport_errors
from tandem.kvtransfer.transports.base import (
    Connection,
    Listener,
    Pool,
    Transport,
    TransportConfig,
    TransportFactory,
)
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid, TandemError, TransferRefused
from tandem.wire.hand_off import TransportOffer

log = get_logger("kvtransfer.registry")

GROUP = "tandem.transports"
CHOOSING = "docs/transports.md#choosing-one"  # of the documentation
# Module and class of each; imported on use, because some need optional libraries.
BUILT_IN = {
    "shm": "tandem.kvtransfer.transports.shm:ShmTransport",
    "tcp": "tandem.kvtransfer.transports.tcp:TcpTransport",
    "cuda_ipc": "tandem.kvtransfer.transports.cuda_ipc:CudaIpcTransport",
    "nccl": "tandem.kvtransfer.transports.nccl:NcclTransport",
    "ucx": "tandem.kvtransfer.transports.ucx:UcxTransport",
    "nixl": "tandem.kvtransfer.transports.nixl:NixlTransport",
}
# The transports of `auto`, best first: offers are made and tried in this order.
AUTO = ("shm", "tcp")
AUTO_ON_GPUS = ("cuda_ipc", "nixl")
# Transports that reach only pools in CPU memory.
CPU_ONLY = frozenset({"shm", "tcp", "ucx", "mooncake"})
# Transports that use the devices of --transfer-device.
WITH_DEVICES = frozenset({"nixl", "ucx", "mooncake"})
# Needs the pool in a file that other processes can map. Engines that allocate their own pool do not use a file.
NEEDS_OWN_POOL = "shm"
# Transports in separate packages (`contrib/`).
PACKAGES = {"mooncake": "tandem-mooncake"}
# Replacements of removed transports.
REMOVED = {"file": "use tcp, or --kv-tier with a directory that both nodes mount"}
# Package that must be installed before `auto` picks the transport.
LIBRARIES = {"nixl": "nixl_cu12"}


def transports(
    name: str,
    config: TransportConfig,
    device: str = "cpu",
    installed: Iterable[EntryPoint] | None = None,
    *,
    is_own_pool: bool = True,
) -> list[Transport]:
    """Return the transports that `--transfer-backend name` allows, best first.

    Args:
        name: `auto` for the best of the built-in ones, or one name; several may be joined with commas.
        config: Settings of every transport.
        device: Device whose memory holds the pool.
        installed: Transports in addition to the built-in ones; None: those of the installed packages.
        is_own_pool: Whether Tandem allocates the pool; vLLM allocates its own.

    Raises:
        ConfigInvalid: A transport is unknown, misses a library, or does not reach that memory.
    """
    found = list(entry_points(group=GROUP) if installed is None else installed)
    return [_make(each, config, found) for each in names_of(name, device, is_own_pool=is_own_pool)]


def names_of(name: str, device: str = "cpu", *, is_own_pool: bool = True) -> list[str]:
    """Return the names of the transports that `--transfer-backend name` allows, best first.

    Args:
        is_own_pool: Whether Tandem allocates the pool; vLLM allocates its own.

    Raises:
        ConfigInvalid: A transport was removed, or does not reach the memory of `device` or this pool.
    """
    if name == "auto":
        if device != "cpu":
            return [each for each in AUTO_ON_GPUS if _may_be_loaded(each)]
        return [each for each in AUTO if is_own_pool or each != NEEDS_OWN_POOL]
    names = name.split(",")
    if removed := [each for each in names if each in REMOVED]:
        raise ConfigInvalid(
            f"--transfer-backend {removed[0]} was removed: {REMOVED[removed[0]]}", topic=CHOOSING
        )
    if not is_own_pool and NEEDS_OWN_POOL in names:
        raise ConfigInvalid(
            f"--transfer-backend {NEEDS_OWN_POOL} needs a pool that Tandem allocates, and vLLM allocates its own: "
            "use auto or tcp",
            topic=CHOOSING,
        )
    if device != "cpu" and (cpu_only := [each for each in names if each in CPU_ONLY]):
        *others, last = [each for each in BUILT_IN if each not in CPU_ONLY]
        raise ConfigInvalid(
            f"--transfer-backend {cpu_only[0]} does not reach the memory of --device {device}: use auto, "
            f"{', '.join(others)} or {last}",
            topic=CHOOSING,
        )
    return names


def listen(allowed: Sequence[Transport], pool: Pool) -> dict[str, Listener]:
    """Listen on every allowed transport that supports this pool, in order.

    Raises:
        ConfigInvalid: No transport supports it; the message has each reason.
    """
    listeners: dict[str, Listener] = {}
    reasons = []
    for transport in allowed:
        try:
            listeners[transport.name] = transport.listen(pool)
        except ConfigInvalid as error:
            reasons.append(f"{transport.name}: {error}")
    if not listeners:
        raise ConfigInvalid("no transport can be used here: " + "; ".join(reasons), topic=CHOOSING)
    if reasons:
        log.warning("kv_transport.not_used", reasons="; ".join(reasons), see=CHOOSING)
    return listeners


def choose(
    offers: Sequence[TransportOffer], allowed: Sequence[Transport], region: MemoryRegion
) -> tuple[str, Connection]:
    """Connect to the first offer that works from this process; may block for seconds.

    Raises:
        TransferRefused: No offer works; the message has each reason.
    """
    by_name = {transport.name: transport for transport in allowed}
    reasons = []
    for offer in offers:
        if (transport := by_name.get(offer.name)) is None:
            reasons.append(f"{offer.name}: not enabled here")
            continue
        try:
            with transport_errors():
                return offer.name, transport.connect(offer, region)
        except TandemError as error:
            log.debug("kv_transport.skipped", transport=offer.name, reason=str(error))
            reasons.append(f"{offer.name}: {error if error.is_public else error.code}")
    raise TransferRefused("no transport in common: " + ("; ".join(reasons) or "no offers"))


def known() -> list[str]:
    """Return the names of all transports: built-in ones, then installed ones."""
    return [*BUILT_IN, *sorted({entry.name for entry in entry_points(group=GROUP)} - set(BUILT_IN))]


def _may_be_loaded(name: str) -> bool:
    return name not in LIBRARIES or find_spec(LIBRARIES[name]) is not None


def _make(name: str, config: TransportConfig, installed: Sequence[EntryPoint]) -> Transport:
    missing = f"--transfer-backend {name} needs a library that is not installed"
    if place := BUILT_IN.get(name):
        module, _, attribute = place.partition(":")
        try:
            built_in: TransportFactory = getattr(import_module(module), attribute)
            return built_in(config)
        except ImportError as error:
            raise ConfigInvalid(
                f"{missing} ({error}): pip install 'tandem-serve[{name}]'", topic=CHOOSING
            ) from error
    for entry in installed:
        if entry.name != name:
            continue
        try:
            factory: TransportFactory = entry.load()
        except ImportError as error:
            raise ConfigInvalid(f"{missing}: {error}", topic=CHOOSING) from error
        return factory(config)
    if name in PACKAGES:
        raise ConfigInvalid(
            f"--transfer-backend {name} is in a separate package: pip install {PACKAGES[name]}",
            topic=CHOOSING,
        )
    raise ConfigInvalid(
        f"no transport {name!r} is installed; use one of {', '.join(known())}", topic=CHOOSING
    )
