"""The choice of an engine's device with any number of GPUs, and the detection of its loss."""

import pytest
import torch

from tandem.engine.config import EngineOptions, config_of_rank
from tandem.engine.device import device_errors, use_device
from tandem.engine.errors import DeviceLost
from tandem.wire.errors import ConfigInvalid
from tests.engine.toy_runner import ToyRunner, toy_engine
from tests.one_engine import ask


class Machine:
    """Fake GPUs that only record the current device."""

    def __init__(self, num_gpus: int) -> None:
        self._num_gpus = num_gpus
        self.current = 0

    def device_count(self) -> int:
        return self._num_gpus

    def set_device(self, device: int) -> None:
        assert 0 <= device < self._num_gpus
        self.current = device


@pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_requested_gpu_becomes_the_current_device(device, index):
    machine = Machine(2)
    use_device(EngineOptions(device=device), machine)
    assert machine.current == index


def test_each_rank_uses_its_own_gpu():
    config, taken = EngineOptions(tp_size=4, device="cuda"), []
    for rank in range(4):
        machine = Machine(4)
        use_device(config_of_rank(config, rank), machine)
        taken.append(machine.current)
    assert taken == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("device", "num_gpus", "words"),
    [
        ("cuda", 0, "--device cuda does not exist: torch finds no GPU"),
        ("cuda:2", 2, "--device cuda:2 does not exist: torch finds cuda:0 to cuda:1"),
    ],
)
def test_missing_gpu_is_refused(device, num_gpus, words):
    with pytest.raises(ConfigInvalid, match=words):
        use_device(EngineOptions(device=device), Machine(num_gpus))


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
def test_fatal_device_error_raises_device_lost(error, wait):
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
def test_recoverable_device_error_is_raised_unchanged(device, error):
    wait = works if device == GPU else failed
    with pytest.raises(type(error)) as raised, device_errors(device, wait):
        raise error
    assert raised.value is error


class BrokenRunner(ToyRunner):
    """A device that fails in every forward."""

    def forward(self, inputs, sampled=None, on_layer_written=None):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_device_failure_in_a_forward_raises_device_lost():
    engine, _ = toy_engine(8, make_runner=BrokenRunner)
    engine.submit(ask([3, 4, 5]))
    with pytest.raises(DeviceLost, match="illegal memory access"):
        engine.step()
