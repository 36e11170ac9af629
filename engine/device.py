"""The device that an engine computes on: chosen here, before anything is put on it, and given up here.

After most errors of CUDA a process has to end: whatever it asks of the device fails from then on. Others,
such as too little memory, are errors of what was asked.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tandem.engine.config import EngineConfig
from tandem.engine.errors import DeviceLost
from tandem.wire.errors import ConfigInvalid


def use_device(config: EngineConfig, gpus: Any = torch.cuda) -> None:
    """Have this thread compute on the device of `config`; raise ConfigInvalid if it is not there.

    Kernels of Triton, streams and events go to the thread's current device, whatever device their tensors
    are on. A thread that makes such things beside the engine's names the device itself.
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


@contextmanager
def device_errors(
    device: torch.device, wait: Callable[[torch.device], None] = torch.cuda.synchronize
) -> Iterator[None]:
    """Raise `DeviceLost` for an error inside after which the device cannot be used: `wait` fails then."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.AcceleratorError) or _is_lost(device, wait):
            raise DeviceLost(f"{device}: {error}") from error
        raise


def _is_lost(device: torch.device, wait: Callable[[torch.device], None]) -> bool:
    if device.type == "cpu":
        return False
    try:
        wait(device)
    except RuntimeError:
        return True
    return False
