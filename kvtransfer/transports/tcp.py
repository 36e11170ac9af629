"""Sockets between any two hosts: several streams, straight from and into pool memory.

`lanes` has the sending end, `tcp_stream` the receiving one. A write is done when the listener has
acknowledged that every byte is in memory.
"""

import socket
from ipaddress import ip_address

import psutil

from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool, TransportConfig, need_cpu_memory
from tandem.kvtransfer.transports.lanes import StreamConnection
from tandem.kvtransfer.transports.tcp_stream import TcpLane, TcpListener
from tandem.wire.errors import ConfigInvalid, TransferRefused
from tandem.wire.hand_off import TransportOffer

# One stream fills 10 Gbit/s; several are for the links above that.
NUM_STREAMS = 4


class TcpTransport:
    """TCP with scatter and gather.

    Raises:
        ConfigInvalid: There is no such network interface, or it has no address.
    """

    name = "tcp"

    def __init__(self, config: TransportConfig | None = None) -> None:
        self._config = config = config or TransportConfig()
        self._host = config.host
        if config.interface:
            self._host = address_of(config.interface, family_of(config.host))

    def listen(self, pool: Pool) -> TcpListener:
        """Begin to receive on a free port."""
        need_cpu_memory(self.name, pool)
        return TcpListener(pool, self._host)

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> StreamConnection:
        """Open the streams."""
        source_host = ""
        if interface := self._config.interface:
            # By address: binding to the device itself takes rights that nodes should not need.
            try:
                source_host = address_of(interface, family_of(str(offer.descriptor.get("host"))))
            except ConfigInvalid as error:
                raise TransferRefused(f"cannot open a stream: {error}") from error
        return StreamConnection(offer, region, TcpLane, NUM_STREAMS, source_host)


# ── network interfaces ───────────────────────────────────────────────────────────────────────────


def address_of(name: str, family: socket.AddressFamily) -> str:
    """Return the IPv4 (AF_INET) or IPv6 (AF_INET6) address of a network interface.

    Raises:
        ConfigInvalid: There is no such interface, or it has no such address.
    """
    found = psutil.net_if_addrs()
    if name not in found:
        raise ConfigInvalid(
            f"--transfer-interface {name}: there is no such network interface; "
            f"there are: {', '.join(found)}"
        )
    for each in found[name]:
        # Link-local ones mean something else on each host.
        if each.family is family and not ip_address(each.address).is_link_local:
            return str(each.address)
    kind, other = ("IPv6", "0.0.0.0") if family is socket.AF_INET6 else ("IPv4", "::")
    raise ConfigInvalid(
        f"--transfer-interface {name} has no {kind} address; --host says which kind: try {other}"
    )


def family_of(host: str) -> socket.AddressFamily:
    """Return which kind of address a host is; a name counts as IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
