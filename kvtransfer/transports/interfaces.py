"""The addresses of this machine's network interfaces, asked of the Linux kernel."""

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from tandem.wire.errors import ConfigInvalid

SIOCGIFADDR = 0x8915  # netdevice(7)
IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def address_of(name: str, family: socket.AddressFamily) -> str:
    """Return the IPv4 (AF_INET) or IPv6 (AF_INET6) address of a network interface.

    Raises:
        ConfigInvalid: There is no such interface, or it has no such address.
    """
    names = [each for _, each in socket.if_nameindex()]
    if name not in names:
        raise ConfigInvalid(
            f"--transfer-interface {name}: there is no such network interface; "
            f"there are: {', '.join(names)}"
        )
    if found := _ipv6(name) if family is socket.AF_INET6 else _ipv4(name):
        return found
    kind, other = ("IPv6", "0.0.0.0") if family is socket.AF_INET6 else ("IPv4", "::")
    raise ConfigInvalid(
        f"--transfer-interface {name} has no {kind} address; --host says which kind: try {other}"
    )


def family_of(host: str) -> socket.AddressFamily:
    """Return which kind of address a host is; a name counts as IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _ipv4(name: str) -> str:
    request = struct.pack("256s", name.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _ipv6(name: str) -> str:
    try:
        lines = IPV6_ADDRESSES.read_text().splitlines()
    except OSError:  # a kernel without IPv6
        return ""
    for line in lines:
        digits, _, _, _, _, interface = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        # Link-local ones mean something else on each host.
        if interface == name and not address.is_link_local:
            return str(address)
    return ""
