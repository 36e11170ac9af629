"""Which transports a name stands for."""

import re

import pytest

from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool
from tandem.kvtransfer.transports.registry import choose, names_of
from tandem.kvtransfer.transports.shm import ShmTransport
from tandem.wire.errors import ConfigInvalid, TransferRefused
from tandem.wire.hand_off import TransportOffer
from tests.loopback import LoopbackTransport


def test_auto_takes_no_transport_that_has_not_run_on_gpus():
    assert "nccl" not in names_of("auto", "cuda:0")
    assert names_of("auto", "cuda:0")[0] == "cuda_ipc"
    assert names_of("nccl", "cuda:0") == ["nccl"]


def test_a_transport_that_does_not_reach_a_gpu_is_refused_naming_those_that_do():
    names = re.escape("give auto, cuda_ipc, nccl or nixl")
    with pytest.raises(ConfigInvalid, match=names):
        names_of("tcp", "cuda:0")


class Failing:
    """A transport whose library raises what it likes."""

    name = "failing"

    def connect(self, _offer, _region):
        raise OSError("no such device at 10.1.2.3")


def offers(*names):
    return [TransportOffer(name=name, descriptor={}) for name in names]


def test_an_offer_whose_library_fails_is_passed_over_for_the_next_that_works():
    listener = LoopbackTransport()
    with MemoryRegion.private(4096) as region:
        taken = listener.listen(Pool.packed(region, 4096, 1)).admit("127.0.0.1").offer
        name, _ = choose([*offers("failing"), taken], [Failing(), listener], region)
    assert name == "loopback"


def test_what_a_library_said_stays_here_when_no_offer_works():
    allowed = [Failing(), ShmTransport()]
    with (
        MemoryRegion.private(4096) as region,
        pytest.raises(TransferRefused, match=r"failing: .*; shm: an invalid offer") as refused,
    ):
        choose(offers("failing", "shm"), allowed, region)
    assert "10.1.2.3" not in refused.value.message
