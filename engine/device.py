"""The device that an engine computes on: chosen here and nowhere else, before anything is put on it."""

from typing import Protocol

import torch

from engine.config import EngineConfig
from wire.errors import ConfigInvalid


class Gpus(Protocol):
    """The GPUs of this machine, as `torch.cuda` has them."""

    def device_count(self) -> int:
        """Return how many this process sees."""
        ...

    def set_device(self, device: int) -> None:
        """Make one the current device of this thread."""
        ...


def use_device(config: EngineConfig, gpus: Gpus = torch.cuda) -> None:
    """Have this thread compute on the device of `config`.

    Kernels of Triton, streams and events go to the thread's current device, whatever device their tensors
    are on. A thread that makes such things beside the engine's names the device itself.

    Raises:
        ConfigInvalid: It is not there.
    """
    device = torch.device(config.device)
    if device.type != "cuda":
        return
    num_gpus, index = gpus.device_count(), device.index or 0
    if config.tp_size > max(1, num_gpus):
        raise ConfigInvalid(f"--tp {config.tp_size} needs as many GPUs; there are {num_gpus}")
    if index >= num_gpus:
        found = f"cuda:0 to cuda:{num_gpus - 1}" if num_gpus else "no GPU"
        raise ConfigInvalid(f"--device {config.device}: torch sees {found} here")
    gpus.set_device(index)
