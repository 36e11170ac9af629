"""TCP between any two hosts: several streams, directly from and into pool memory.

`lanes.py` has the sending end, `tcp_stream.py` the receiving end. A write is complete when the listener has
acknowledged that every byte is in memory.
"""

import socket
from ipaddress import ip_address

import psutil

from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool, TransportConfig, require_cpu_memory
from tandem.kvtransfer.transports.lanes import StreamConnection
from tandem.kvtransfer.transports.tcp_stream import TcpLane, TcpListener
from tandem.wire.errors import ConfigInvalid, TransferRefused
from tandem.wire.hand_off import TransportOffer

# One stream fills 10 Gbit/s; faster links need several.
NUM_STREAMS = 4


class TcpTransport:
    """TCP with scatter and gather.

    Raises:
        ConfigInvalid: The network interface does not exist, or has no address.
    """

    name = "tcp"

    def __init__(self, config: TransportConfig | None = None) -> None:
        self._config = config = config or TransportConfig()
        self._host = config.host
        if config.interface:
            self._host = address_of(config.interface, family_of(config.host))

    def listen(self, pool: Pool) -> TcpListener:
        """Start receiving."""
        require_cpu_memory(self.name, pool)
        return TcpListener(pool, self._host, port=self._config.port)

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> StreamConnection:
        """Open the streams."""
        source_host = ""
        if interface := self._config.interface:
            # Bind by address: binding to the device needs privileges that nodes should not have.
            try:
                source_host = address_of(interface, family_of(str(offer.descriptor.get("host"))))
            except ConfigInvalid as error:
                raise TransferRefused(f"cannot open a stream: {error}") from error
        return StreamConnection(offer, region, TcpLane, NUM_STREAMS, source_host)


# ── network interfaces ───────────────────────────────────────────────────────────────────────────


def address_of(name: str, family: socket.AddressFamily) -> str:
    """Return the IPv4 (AF_INET) or IPv6 (AF_INET6) address of a network interface.

    Raises:
        ConfigInvalid: The interface does not exist, or has no address of this family.
    """
    found = psutil.net_if_addrs()
    if name not in found:
        raise ConfigInvalid(
            f"--transfer-interface {name}: no such network interface; use one of {', '.join(found)}, and "
            "--transfer-device for an RDMA device"
        )
    for each in found[name]:
        # Link-local addresses are valid only on one network segment.
        if each.family is family and not ip_address(each.address).is_link_local:
            return str(each.address)
    version, other_host = ("IPv6", "0.0.0.0") if family is socket.AF_INET6 else ("IPv4", "::")
    raise ConfigInvalid(
        f"--transfer-interface {name} has no {version} address, which --host selects: "
        f"try --host {other_host}"
    )


def family_of(host: str) -> socket.AddressFamily:
    """Return the address family of a host; a name counts as IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
