"""`--transfer-interface`, with the one interface that every machine has."""

import socket

import pytest

from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports import interfaces
from tandem.kvtransfer.transports.base import Pool, TransportConfig
from tandem.kvtransfer.transports.interfaces import address_of
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.wire.errors import ConfigInvalid, TransferRefused


def test_the_kernel_tells_the_addresses_of_an_interface():
    assert address_of("lo", socket.AF_INET) == "127.0.0.1"
    assert address_of("lo", socket.AF_INET6) == "::1"


def test_an_unknown_interface_is_refused_naming_those_there_are():
    with pytest.raises(ConfigInvalid, match=r"--transfer-interface ib7: .* there are: .*lo"):
        TcpTransport(TransportConfig(interface="ib7"))


def test_an_interface_without_such_an_address_is_refused(tmp_path, monkeypatch):
    link_local = tmp_path / "if_inet6"
    link_local.write_text("fe800000000000000000000000000001 01 80 20 80       lo\n")
    for path in (link_local, tmp_path / "nowhere"):
        monkeypatch.setattr(interfaces, "IPV6_ADDRESSES", path)
        with pytest.raises(ConfigInvalid, match="no IPv6 address"):
            TcpTransport(TransportConfig(host="::", interface="lo"))


@pytest.mark.parametrize(("host", "address"), [("0.0.0.0", "127.0.0.1"), ("::", "::1")])
def test_streams_come_from_the_interface_and_go_to_its_address(host, address):
    transport = TcpTransport(TransportConfig(host=host, interface="lo"))
    with MemoryRegion.private(4096) as region:
        listener = transport.listen(Pool(region, 4096, 1))
        admission = listener.admit("192.0.2.1")
        assert admission.offer.descriptor["host"] == address
        connection = transport.connect(admission.offer, region)
        assert {stream.getsockname()[0] for stream in connection._streams} == {address}
        connection.close()
        listener.close()


def test_an_offer_of_the_other_family_is_refused_if_the_interface_has_no_such_address(
    tmp_path, monkeypatch
):
    with MemoryRegion.private(4096) as region:
        listener = TcpTransport(TransportConfig(host="::1")).listen(Pool(region, 4096, 1))
        monkeypatch.setattr(interfaces, "IPV6_ADDRESSES", tmp_path / "nowhere")
        here = TcpTransport(TransportConfig(interface="lo"))
        with pytest.raises(TransferRefused, match="no IPv6 address"):
            here.connect(listener.admit("::1").offer, region)
        listener.close()
