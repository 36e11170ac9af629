"""Selects the engine's device, copies arrays to it, and detects its loss.

After most CUDA errors all later calls fail, and the process must exit. Other errors, such as out of memory, affect
only the call that raised them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt
import torch

from tandem.engine.config import EngineOptions
from tandem.engine.errors import DeviceLost
from tandem.wire.errors import ConfigInvalid


def use_device(config: EngineOptions, gpus: Any = torch.cuda) -> None:
    """Set this thread's device to that of `config`, before anything is allocated on it.

    Triton kernels, streams and events use the thread's current device, not that of their tensors. Threads other than
    the engine's must select the device themselves.

    Raises:
        ConfigInvalid: The device does not exist.
    """
    device = torch.device(config.device)
    if device.type != "cuda":
        return
    num_gpus, index = gpus.device_count(), device.index or 0
    if config.tp_size > max(1, num_gpus):
        raise ConfigInvalid(
            f"--tp {config.tp_size} needs {config.tp_size} GPUs, and torch finds {num_gpus}: lower --tp"
        )
    if index >= num_gpus:
        found = f"cuda:0 to cuda:{num_gpus - 1}" if num_gpus else "no GPU"
        raise ConfigInvalid(f"--device {config.device} does not exist: torch finds {found}")
    gpus.set_device(index)


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return the values as a tensor on the device. On a CPU the tensor shares their memory.

    On a GPU the copy from pinned memory is queued, so that the host does not wait for it.
    """
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def device_errors(
    device: torch.device, wait: Callable[[torch.device], None] = torch.cuda.synchronize
) -> Iterator[None]:
    """Raise `DeviceLost` for an error in the block after which the device is unusable, so that `wait` fails too."""
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
