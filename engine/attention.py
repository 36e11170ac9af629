"""The seam between transformers' models and paged KV: a function that models call, and backends.

Registered under `NAME` with `AttentionInterface` and, returning no mask, with
`AttentionMaskInterface`. A forward passes a `PagedBatch` through the model; its backend writes each
layer's K and V into the pool and attends over the pages.

| backend | for | file |
|---|---|---|
| `torch` | any device and type; the reference | `attention_torch.py` |
| `cpu` | float32 and bfloat16 on CPUs: decoding rows read the pages where they are | `attention_cpu.py` |
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

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
    scratch: dict[Any, Any] = field(default_factory=dict)

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.kv.shape[4]

    def write(self, layer: LayerInputs) -> None:
        """Put K and V of every row into the pool, in the pool's type."""
        pages = self.kv[:, layer.index]  # (num_pages, 2, num_kv_heads, page_size, head_dim)
        pages[:, 0][self.write_pages, :, self.write_offsets] = layer.key.to(self.kv.dtype)
        pages[:, 1][self.write_pages, :, self.write_offsets] = layer.value.to(self.kv.dtype)


class AttentionBackend(Protocol):
    """Attends over pages."""

    name: str

    def attend(self, layer: LayerInputs, batch: PagedBatch) -> torch.Tensor:
        """Write K and V of this forward's rows, then attend with each row over its sequence.

        Returns:
            Shape (num_rows, num_heads, head_dim), in the query's type.
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
    return paged_batch.backend.attend(layer, paged_batch).unsqueeze(0), None


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Tell transformers that no mask is to be built."""


def register() -> str:
    """Make the attention known to transformers; return the name to load models with."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    return NAME
