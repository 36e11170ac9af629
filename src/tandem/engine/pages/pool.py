"""The memory of a pool of pages, and each layer's views of it. Ownership is tracked in `kv_cache`.

A page is contiguous, so that it can be pushed, hashed and stored as one piece:

```
 page │ K of layer 0 │ V of layer 0 │ K of layer 1 │ V of layer 1 │ ...      each [head][token][element]
```

Layers may differ in the number and size of heads. A latent layer stores no V, because its V is the first part of its
K. A layer that stores nothing reads K and V of a different layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from tandem.engine.shape import ModelShape
from tandem.wire.hand_off import LayerKV


@dataclass(frozen=True, slots=True, eq=False)
class LayerPages:
    """One layer's part of every page, as writable views.

    Attributes:
        begin: Offset of the layer in a page, in elements.
        key: Shape (num_pages, num_kv_heads, page_size, key_dim).
        value: Shape (num_pages, num_kv_heads, page_size, value_dim).
        joined: K and V in one view; None if their sizes differ.
            Shape (num_pages, 2, num_kv_heads, page_size, head_dim).
        is_shared: Whether the layer stores nothing, so that these are the views of a different layer.
    """

    begin: int
    key: torch.Tensor
    value: torch.Tensor
    joined: torch.Tensor | None
    is_shared: bool = False

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads."""
        return self.key.shape[1]


class KVPool:
    """K and V of a model, or of a rank's shard, in pages. `pages` has shape (num_pages, page_elements)."""

    def __init__(self, pages: torch.Tensor, shape: ModelShape, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self.layers = _views(pages, shape, page_size)
        self._rows: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def device(self) -> torch.device:
        """The device that holds the memory."""
        return self.pages.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of K and V."""
        return self.pages.dtype

    @property
    def page_elements(self) -> int:
        """Number of elements in a page."""
        return self.pages.shape[1]

    def rows(self, size: int) -> torch.Tensor:
        """Return a view of all runs of `size` elements that start at multiples of the page size. Shape (n, size).

        K or V of one head and layer in a page is such a row. Rows overlap, so do not write to them.
        """
        found = self._rows.get(size)
        if found is None:
            flat, step = self.pages.view(-1), self.page_size
            shape = ((flat.numel() - size) // step + 1, size)
            self._rows[size] = found = flat.as_strided(shape, (step, 1), flat.storage_offset())
        return found

    @override
    def __repr__(self) -> str:
        return f"KVPool({len(self)} pages x {self.page_elements} {self.dtype})"


def make_pool(
    shape: ModelShape,
    num_pages: int,
    page_size: int,
    device: str,
    memory: torch.Tensor | None = None,
    *,
    has_scratch_page: bool = False,
) -> KVPool:
    """Create a pool.

    Args:
        memory: Bytes on `device` to use, such as a shared region; None allocates new memory.
        has_scratch_page: Add a page with id `num_pages` that belongs to no request, for padding rows of a batch.
    """
    num_made = num_pages + has_scratch_page
    dtype: torch.dtype = getattr(torch, shape.kv_dtype)
    sizes = (num_made, page_size * shape.kv_bytes_per_token // dtype.itemsize)
    if memory is None:
        pages = torch.zeros(sizes, dtype=dtype, device=device)
    else:
        pages = memory[: sizes[0] * sizes[1] * dtype.itemsize].view(dtype).view(sizes)
    return KVPool(pages, shape, page_size)


def pool_pages(shape: ModelShape, page_size: int, size_bytes: int) -> int:
    """Return the number of pages that fit into `size_bytes`."""
    return size_bytes // (shape.kv_bytes_per_token * page_size)


def _views(pages: torch.Tensor, shape: ModelShape, page_size: int) -> list[LayerPages]:
    views: list[LayerPages] = []
    begin = 0
    for index, layer in enumerate(shape.kv_layers):
        if not layer.num_kv_heads:
            source = views[shape.kv_sources[index]]
            views.append(
                LayerPages(source.begin, source.key, source.value, source.joined, is_shared=True)
            )
            continue
        views.append(_view(pages, begin, layer, page_size))
        begin += page_size * layer.num_kv_heads * (layer.key_dim + layer.value_dim)
    return views


def _view(pages: torch.Tensor, begin: int, layer: LayerKV, page_size: int) -> LayerPages:
    def plane(first: int, heads: Sequence[int], dim: int) -> torch.Tensor:
        size = page_size * dim
        for count in heads:
            size *= count
        return pages[:, first : first + size].view(len(pages), *heads, page_size, dim)

    heads, key_dim, value_dim = layer.num_kv_heads, layer.key_dim, layer.value_dim
    key = plane(begin, (heads,), key_dim)
    value = plane(begin + page_size * heads * key_dim, (heads,), value_dim)
    joined = plane(begin, (2, heads), key_dim) if key_dim == value_dim else None
    return LayerPages(begin, key, value, joined)
