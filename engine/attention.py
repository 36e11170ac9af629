"""The seam between transformers' models and paged KV: a function that models call, and backends.

Registered under `NAME` with `AttentionInterface`; with `AttentionMaskInterface` on purpose not:
transformers then makes no mask, nor waits for the GPU to tell whether it needs one. A forward passes
a `PagedBatch` through the model; its backend writes each layer's K and V into the pool and attends
over the pages.

| backend | for | file |
|---|---|---|
| `torch` | any device and type; the reference | `attention_torch.py` |
| `cpu` | float32 and bfloat16 on CPUs: decoding rows read the pages where they are | `attention_cpu.py` |
| `triton` | GPUs; our own kernels, any head dim and type | `attention_triton.py` |
| `flashinfer` | GPUs, 16-bit types; FlashInfer's kernels, where it is installed | `attention_flashinfer.py` |
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from transformers import AttentionInterface

from engine.forward import Ints32

NAME = "tandem_paged"


@dataclass(frozen=True, slots=True)
class Scoring:
    """How one layer turns queries and keys into weights.

    Attributes:
        scale: Of the scores.
        window: Keys a query sees, itself included; all when None.
        softcap: Scores are bounded to ± this by tanh, as in Gemma 2; unbounded when None.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(slots=True, eq=False)
class LayerInputs:
    """What one layer brings to attention.

    Attributes:
        query: Shape (num_rows, num_heads, head_dim), after rotary embedding; any strides.
        key, value: Shape (num_rows, num_kv_heads, head_dim); any strides.
    """

    index: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scoring: Scoring


@dataclass(slots=True, eq=False)
class PagedBatch:
    """Where the rows of one forward read and write KV. See `ForwardInputs` for the order of rows.

    Attributes:
        kv: The pool. Shape (num_pages, num_layers, 2, num_kv_heads, page_size, head_dim).
        page_table: Shape (num_seqs, max_pages), int32, on the pool's device.
        kv_lens: Shape (num_seqs,), int32, on the pool's device.
        write_pages, write_offsets: Where each row's KV goes. Shape (num_rows,), int64, likewise.
        host_page_table, host_kv_lens, host_query_starts: The same numbers on the host.
        wrote: Called with each layer's number when its K and V are written, or, on a device that runs
            beside the host, queued to be.
        is_recorded: This forward is recorded into a graph: the tensors stay, what is in them changes.
        scratch: What the backend keeps between the layers of this forward.
    """

    backend: "AttentionBackend"
    kv: torch.Tensor
    num_decodes: int
    page_table: torch.Tensor
    kv_lens: torch.Tensor
    write_pages: torch.Tensor
    write_offsets: torch.Tensor
    host_page_table: Ints32
    host_kv_lens: Ints32
    host_query_starts: Ints32
    wrote: Callable[[int], None] | None = None
    is_recorded: bool = False
    scratch: dict[Any, Any] = field(default_factory=dict)

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.kv.shape[4]

    def write(self, layer: LayerInputs) -> None:
        """Put K and V of every row into the pool, in the pool's type."""
        pages = self.kv[:, layer.index]  # (num_pages, 2, num_kv_heads, page_size, head_dim)
        is_eight_bit = self.kv.dtype.itemsize == 1
        # Not every device can index eight-bit floats; all can index bytes.
        pages = pages.view(torch.uint8) if is_eight_bit else pages
        for which, rows in enumerate((layer.key, layer.value)):
            narrowed = self._to_eight_bits(rows) if is_eight_bit else rows.to(self.kv.dtype)
            pages[:, which][self.write_pages, :, self.write_offsets] = narrowed

    def _to_eight_bits(self, rows: torch.Tensor) -> torch.Tensor:
        # e4m3 has no infinity: beyond its range torch would make NaN of what is merely large.
        largest = torch.finfo(self.kv.dtype).max
        return rows.clamp(-largest, largest).to(self.kv.dtype).view(torch.uint8)


class AttentionBackend(Protocol):
    """Attends over pages."""

    name: str

    def attend(self, layer: LayerInputs, batch: PagedBatch) -> torch.Tensor:
        """Write K and V of this forward's rows, then attend with each row over its sequence.

        Returns:
            Shape (num_rows, num_heads, head_dim), in the query's type.
        """
        ...


@runtime_checkable
class GraphBackend(AttentionBackend, Protocol):
    """A backend whose `attend`, for decoding rows, can be recorded into a CUDA graph."""

    def prepare(self, batch: PagedBatch) -> None:
        """Do what a recorded forward cannot: what depends on numbers that the host knows.

        Called before each replay, once the batch's host numbers are those of the forward to come.
        """
        ...


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged_batch: PagedBatch,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attend for one layer of a transformers model.

    Args:
        module: The attention module; `layer_idx` names the layer.
        query: Shape (1, num_heads, num_rows, head_dim), after rotary embedding.
        key, value: Shape (1, num_kv_heads, num_rows, head_dim).
        attention_mask: Always None: which keys a row sees is the batch's.
        scaling, sliding_window, softcap: See `Scoring`; `scaling` is 1/sqrt(head_dim) when None.

    Returns:
        The output, shape (1, num_rows, num_heads, head_dim), and no weights.
    """
    del attention_mask
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = LayerInputs(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        Scoring(scale, sliding_window, softcap),
    )
    attended = paged_batch.backend.attend(layer, paged_batch)
    if paged_batch.wrote is not None:
        paged_batch.wrote(layer.index)
    return attended.unsqueeze(0), None


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the values on the device; on a CPU the memory is shared.

    To a GPU the copy is queued behind what runs, from pinned memory, so that nothing waits for it.
    """
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def register(*, is_compiled: bool = False) -> str:
    """Make the attention known to transformers; return the name to load models with.

    Args:
        is_compiled: The model around it is going to be: the compiler is then to leave attention as it is,
            for what a backend does on the host is new with every forward.
    """
    function = paged_attention
    if is_compiled:
        function = torch.compiler.disable(paged_attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(NAME, function)
    return NAME
