"""Which transports there are, built-in and installed ones, and which one two ends take."""

from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from tandem.kvtransfer.control import transport_errors
from tandem.kvtransfer.region import MemoryRegion
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
CHOOSING = "transports#choosing-one"  # of the documentation
# Module and class of each; imported when asked for, since some stand on libraries that are optional.
BUILT_IN = {
    "shm": "tandem.kvtransfer.transports.shm:ShmTransport",
    "tcp": "tandem.kvtransfer.transports.tcp:TcpTransport",
    "cuda_ipc": "tandem.kvtransfer.transports.cuda_ipc:CudaIpcTransport",
    "nccl": "tandem.kvtransfer.transports.nccl:NcclTransport",
    "ucx": "tandem.kvtransfer.transports.ucx:UcxTransport",
    "nixl": "tandem.kvtransfer.transports.nixl:NixlTransport",
}
# What `auto` means, best first: offers are made, and tried, in this order.
AUTO = ("shm", "tcp")
AUTO_ON_GPUS = ("cuda_ipc", "nixl")
# Those that only reach pools in the CPU's memory.
CPU_ONLY = frozenset({"shm", "tcp", "file", "ucx", "mooncake"})
# Those that are packages of their own (`contrib/`).
PACKAGES = {"file": "tandem-file", "mooncake": "tandem-mooncake"}
# What `auto` looks for before it takes a transport that stands on it.
LIBRARIES = {"nixl": "nixl_cu12"}


def transports(
    name: str,
    config: TransportConfig,
    device: str = "cpu",
    installed: Iterable[EntryPoint] | None = None,
) -> list[Transport]:
    """Return the transports that `--transfer-backend name` allows, best first.

    Args:
        name: `auto` for the best of the built-in ones, or one name; several may be joined with commas.
        config: Passed to each.
        device: Whose memory the pool is in.
        installed: Transports beside the built-in ones; None: those of the installed packages.

    Raises:
        ConfigInvalid: There is none of that name, what it stands on is not installed, or it does not
            reach that memory.
    """
    found = list(entry_points(group=GROUP) if installed is None else installed)
    return [_make(each, config, found) for each in names_of(name, device)]


def names_of(name: str, device: str = "cpu") -> list[str]:
    """Return the names that `--transfer-backend name` stands for, best first.

    Raises:
        ConfigInvalid: One of them does not reach the memory of `device`.
    """
    if name == "auto":
        return list(AUTO) if device == "cpu" else [n for n in AUTO_ON_GPUS if _may_be_loaded(n)]
    names = name.split(",")
    if device != "cpu" and (beside := [each for each in names if each in CPU_ONLY]):
        *some, last = [each for each in BUILT_IN if each not in CPU_ONLY]
        raise ConfigInvalid(
            f"--transfer-backend {beside[0]} does not reach the memory of --device {device}: give auto, "
            f"{', '.join(some)} or {last}",
            topic=CHOOSING,
        )
    return names


def listen(allowed: Sequence[Transport], pool: Pool) -> dict[str, Listener]:
    """Listen on every transport that can write this pool, in order.

    Raises:
        ConfigInvalid: None can, and why.
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
    return listeners


def choose(
    offers: Sequence[TransportOffer], allowed: Sequence[Transport], region: MemoryRegion
) -> tuple[str, Connection]:
    """Connect to the first offer that really works from here; may block for seconds.

    Raises:
        TransferRefused: None does, and why.
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
    raise TransferRefused("no transport in common: " + ("; ".join(reasons) or "nothing offered"))


def known() -> list[str]:
    """Return the names of all transports: built-in ones, then installed ones."""
    return [*BUILT_IN, *sorted({entry.name for entry in entry_points(group=GROUP)} - set(BUILT_IN))]


def _may_be_loaded(name: str) -> bool:
    return name not in LIBRARIES or find_spec(LIBRARIES[name]) is not None


def _make(name: str, config: TransportConfig, installed: Sequence[EntryPoint]) -> Transport:
    missing = f"--transfer-backend {name} needs a library that is not here"
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
            f"--transfer-backend {name} is a package of its own: pip install {PACKAGES[name]}",
            topic=CHOOSING,
        )
    raise ConfigInvalid(
        f"no transport {name!r} is installed; there are: {', '.join(known())}", topic=CHOOSING
    )
