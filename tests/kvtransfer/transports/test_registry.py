"""Which transports a name stands for."""

import re

import pytest

from tandem.kvtransfer.transports.registry import names_of
from tandem.wire.errors import ConfigInvalid


def test_auto_takes_no_transport_that_has_not_run_on_gpus():
    assert "nccl" not in names_of("auto", "cuda:0")
    assert names_of("auto", "cuda:0")[0] == "cuda_ipc"
    assert names_of("nccl", "cuda:0") == ["nccl"]


def test_a_transport_that_does_not_reach_a_gpu_is_refused_naming_those_that_do():
    names = re.escape("give auto, cuda_ipc, nccl or nixl")
    with pytest.raises(ConfigInvalid, match=names):
        names_of("tcp", "cuda:0")
