"""Which device an engine takes, on machines with any number of GPUs."""

import pytest

from engine.config import EngineConfig, config_of_rank
from engine.device import use_device
from wire.errors import ConfigInvalid


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


def test_more_ranks_than_gpus_are_refused():
    config = EngineConfig(model_dir="", tp_size=3, device="cuda:0")
    with pytest.raises(ConfigInvalid, match="--tp 3 needs as many GPUs; there are 2"):
        use_device(config, Machine(2))


def test_a_cpu_needs_no_gpu():
    use_device(EngineConfig(model_dir="", device="cpu"), Machine(0))
