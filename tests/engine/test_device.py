"""Which device an engine takes, on machines with any number of GPUs, and when it gives it up."""

import pytest
import torch

from tandem.engine.config import EngineConfig, config_of_rank
from tandem.engine.device import device_errors, use_device
from tandem.engine.errors import DeviceLost
from tandem.wire.errors import ConfigInvalid
from tests.engine.toy_runner import ToyRunner, toy_engine
from tests.one_engine import ask


class Machine:
    """GPUs that only remember which one is current."""

    def __init__(self, num_gpus: int) -> None:
        self._num_gpus = num_gpus
        self.current = 0

    def device_count(self) -> int:
        return self._num_gpus

    def set_device(self, device: int) -> None:
        assert 0 <= device < self._num_gpus
        self.current = device


@pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_the_gpu_that_was_asked_for_is_the_current_one(device, index):
    machine = Machine(2)
    use_device(EngineConfig(model_dir="", device=device), machine)
    assert machine.current == index


def test_each_rank_computes_on_a_gpu_of_its_own():
    config, taken = EngineConfig(model_dir="", tp_size=4, device="cuda"), []
    for rank in range(4):
        machine = Machine(4)
        use_device(config_of_rank(config, rank), machine)
        taken.append(machine.current)
    assert taken == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("device", "num_gpus", "words"),
    [
        ("cuda", 0, "--device cuda: torch sees no GPU here"),
        ("cuda:2", 2, "--device cuda:2: torch sees cuda:0 to cuda:1 here"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(device, num_gpus, words):
    with pytest.raises(ConfigInvalid, match=words):
        use_device(EngineConfig(model_dir="", device=device), Machine(num_gpus))


GPU = torch.device("cuda:1")


def failed(_device) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def works(_device) -> None:
    pass


@pytest.mark.parametrize(
    ("error", "wait"),
    [
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), works),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), failed),
        (torch.OutOfMemoryError("CUDA out of memory"), failed),
    ],
)
def test_an_error_after_which_the_device_cannot_be_used_loses_it(error, wait):
    with pytest.raises(DeviceLost, match="cuda:1: "), device_errors(GPU, wait):
        raise error


@pytest.mark.parametrize(
    ("device", "error"),
    [
        (GPU, torch.OutOfMemoryError("CUDA out of memory")),
        (GPU, RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")),
        (GPU, ZeroDivisionError()),
        (torch.device("cpu"), RuntimeError("mat1 and mat2 shapes cannot be multiplied")),
    ],
)
def test_an_error_of_what_was_asked_of_the_device_does_not_lose_it(device, error):
    wait = works if device == GPU else failed
    with pytest.raises(type(error)) as raised, device_errors(device, wait):
        raise error
    assert raised.value is error


class BrokenRunner(ToyRunner):
    """A device that fails in every forward."""

    def forward(self, inputs, sampled=None, wrote=None):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_an_engine_whose_device_fails_in_a_forward_has_lost_it():
    engine, _ = toy_engine(8, make_runner=BrokenRunner)
    engine.submit(ask([3, 4, 5]))
    with pytest.raises(DeviceLost, match="illegal memory access"):
        engine.step()
