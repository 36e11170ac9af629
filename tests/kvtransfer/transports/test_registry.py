"""The transports that a name selects."""

import re

import pytest

from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool
from tandem.kvtransfer.transports.registry import choose, names_of
from tandem.kvtransfer.transports.shm import ShmTransport
from tandem.wire.errors import ConfigInvalid, TransferRefused
from tandem.wire.hand_off import TransportOffer
from tests.loopback import LoopbackTransport


def test_auto_picks_no_transport_that_is_untested_on_gpus():
    assert "nccl" not in names_of("auto", "cuda:0")
    assert names_of("auto", "cuda:0")[0] == "cuda_ipc"
    assert names_of("nccl", "cuda:0") == ["nccl"]


def test_cpu_only_transport_is_refused_on_gpus_with_those_that_work():
    names = re.escape("use auto, cuda_ipc, nccl or nixl")
    with pytest.raises(ConfigInvalid, match=names):
        names_of("tcp", "cuda:0")


def test_a_pool_of_vllm_is_not_offered_over_shm():
    assert names_of("auto", is_own_pool=False) == ["tcp"]
    assert names_of("ucx,tcp", is_own_pool=False) == ["ucx", "tcp"]
    for name in ("shm", "tcp,shm"):
        with pytest.raises(ConfigInvalid, match="use auto or tcp"):
            names_of(name, is_own_pool=False)


class Failing:
    """A transport whose library raises what it likes."""

    name = "failing"

    def connect(self, _offer, _region):
        raise OSError("no such device at 10.1.2.3")


def offers(*names):
    return [TransportOffer(name=name, descriptor={}) for name in names]


def test_offer_whose_library_fails_is_skipped_for_the_next_that_works():
    listener = LoopbackTransport()
    with MemoryRegion.private(4096) as region:
        taken = listener.listen(Pool.packed(region, 4096, 1)).admit("127.0.0.1").offer
        name, _ = choose([*offers("failing"), taken], [Failing(), listener], region)
    assert name == "loopback"


def test_library_errors_are_not_sent_to_the_peer_when_no_offer_works():
    allowed = [Failing(), ShmTransport()]
    with (
        MemoryRegion.private(4096) as region,
        pytest.raises(TransferRefused, match=r"failing: .*; shm: invalid shm offer") as refused,
    ):
        choose(offers("failing", "shm"), allowed, region)
    assert "10.1.2.3" not in refused.value.message
