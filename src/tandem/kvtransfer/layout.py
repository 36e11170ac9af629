"""The layout of a KV page, and of a pool of pages. No memory, no copies."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tandem.wire.hand_off import LayerKV, LayoutInfo, Strip

# 256 TiB, the address space of a process. Keeps offsets of valid layouts far below the limit of int64.
MAX_POOL_BYTES = 1 << 48


Int64s = NDArray[np.int64]


class Planes(NamedTuple):
    """K and V of every layer in a page: plane 2 i is K of layer i, plane 2 i + 1 its V. The protocol calls them slabs.

    Attributes:
        begin: Offset of each plane in a page, then the page size. Shape (2 * num_layers + 1,).
        base: Offset in the pool of each plane of page 0. Shape (2 * num_layers,).
        stride: Bytes in the pool from a plane of one page to that of the next. Shape (2 * num_layers,).
        num_heads: Heads of each plane; 0 for an empty plane. Shape (2 * num_layers,).
        token_bytes: Bytes of one token in one head. Shape (2 * num_layers,).
        layer_step: Bytes in the pool from each layer to the next; None if they differ.
    """

    begin: Int64s
    base: Int64s
    stride: Int64s
    num_heads: Int64s
    token_bytes: Int64s
    layer_step: int | None


class Strips(NamedTuple):
    """Positions of a pool's pages, strip by strip in memory order. See `Strip`.

    Attributes:
        base: Offset of page 0 in each strip. Shape (num_strips,).
        stride: Bytes from one page to the next. Shape (num_strips,).
        width: Bytes of one page. Shape (num_strips,).
    """

    num_pages: int
    base: Int64s
    stride: Int64s
    width: Int64s

    @classmethod
    def packed(cls, num_pages: int, page_bytes: int) -> "Strips":
        """Return the single strip of a pool of contiguous pages."""
        one = np.array([page_bytes], np.int64)
        return cls(num_pages, np.zeros(1, np.int64), one, one)

    @property
    def end(self) -> int:
        """Offset in the pool of the end of the last page."""
        base, stride, width = (int(column[-1]) for column in self[1:])
        return base + (self.num_pages - 1) * stride + width

    def pages(self, offset: Int64s, size_bytes: Int64s) -> Int64s:
        """Return the pages that byte ranges overlap, with repeats. Every size must be positive.

        Raises:
            ValueError: A range has bytes outside all pages, or in two strips.
        """
        strip = np.maximum(np.searchsorted(self.base, offset, "right") - 1, 0)
        stride, width = self.stride[strip], self.width[strip]
        past = offset - self.base[strip]
        first, slot = np.divmod(past, stride)
        last = (past + size_bytes - 1) // stride
        is_inside = (past >= 0) & (last < self.num_pages)
        is_inside &= (stride == width) | (slot + size_bytes <= width)
        if not is_inside.all():
            raise ValueError("a byte range is not inside the pages of one strip")
        count = last - first + 1
        return np.repeat(first - (np.cumsum(count) - count), count) + np.arange(count.sum())


class KVLayout(LayoutInfo, frozen=True):
    """A valid layout. Peers send an unchecked `LayoutInfo`.

    Raises:
        ValueError: A size is not positive, the layers contradict the totals, strips overlap, or the pool
            is larger than `MAX_POOL_BYTES`.
    """

    @classmethod
    def of_layers(
        cls, num_pages: int, page_size: int, layers: tuple[LayerKV, ...], dtype: str, itemsize: int
    ) -> "KVLayout":
        """Return the layout of a model with these layers."""
        first = layers[0]
        if all(layer == first for layer in layers) and first.key_dim == first.value_dim:
            heads, dim = first.num_kv_heads, first.key_dim
            return cls(num_pages, page_size, len(layers), heads, dim, dtype, itemsize)
        dim = sum(each.num_kv_heads * (each.key_dim + each.value_dim) for each in layers)
        return cls(num_pages, page_size, len(layers), 1, dim, dtype, itemsize, layers)

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.layers:
            self._check_layers()
        if (num_bytes := self.num_pages * self.page_bytes) > MAX_POOL_BYTES:
            raise ValueError(f"the pool has {num_bytes} bytes, more than a process can address")
        if self.strips:
            self._check_strips()

    def _check_layers(self) -> None:
        """Raise ValueError unless number and size of the layers match the totals."""
        if len(self.layers) != self.num_layers:
            raise ValueError(f"{len(self.layers)} layers are described, {self.num_layers} reported")
        if any(min(each.num_kv_heads, each.key_dim, each.value_dim) < 0 for each in self.layers):
            raise ValueError("a layer has a negative size")
        if any(each.num_kv_heads == 0 and (each.key_dim or each.value_dim) for each in self.layers):
            raise ValueError("a layer without heads has a size")
        dim = sum(each.num_kv_heads * (each.key_dim + each.value_dim) for each in self.layers)
        if dim != self.head_dim:
            raise ValueError(f"the layers have {dim} elements per token, {self.head_dim} reported")

    def _check_strips(self) -> None:
        """Raise ValueError unless the strips hold every plane and do not overlap."""
        if sum(each.num_planes for each in self.strips) != 2 * self.num_layers:
            raise ValueError(f"the strips do not hold the {2 * self.num_layers} planes of a page")
        if any(min(each.base, each.num_planes - 1, each.stride - 1) < 0 for each in self.strips):
            raise ValueError("a size of a strip is not positive")
        if any(max(each.base, each.stride) > MAX_POOL_BYTES for each in self.strips):
            raise ValueError("a strip is larger than a process can address")
        places = self.places
        begins = [*(each.base for each in self.strips), MAX_POOL_BYTES + 1]
        for strip, width, following in zip(self.strips, places.width, begins[1:], strict=True):
            pages_end = strip.base + (self.num_pages - 1) * strip.stride + int(width)
            if width > strip.stride or pages_end > following:
                raise ValueError("strips overlap")
            if not width:
                raise ValueError("a strip has only empty planes")

    @property
    def all_heads_bytes(self) -> int:
        """Bytes of one token: K and V of all layers and heads."""
        return self.page_bytes // self.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: K and V of all layers."""
        num_rows = self.num_kv_heads * (1 if self.layers else 2 * self.num_layers)
        return num_rows * self.page_size * self.head_dim * self.itemsize

    @property
    def pool_bytes(self) -> int:
        """Bytes from the start of the pool to the end of its last page."""
        return self.places.end if self.strips else self.num_pages * self.page_bytes

    @property
    def places(self) -> Strips:
        """Positions of the pages in the pool."""
        if not self.strips:
            return Strips.packed(self.num_pages, self.page_bytes)
        stops = np.cumsum([each.num_planes for each in self.strips])
        ends = _begins(self)[stops]
        base = np.array([each.base for each in self.strips], np.int64)
        stride = np.array([each.stride for each in self.strips], np.int64)
        return Strips(self.num_pages, base, stride, np.diff(ends, prepend=0))

    @property
    def planes(self) -> Planes:
        """Positions of K and V of each layer."""
        return _planes(self)

    def has_same_pages(self, other: "KVLayout") -> bool:
        """Return whether the pages of both layouts are identical byte for byte."""
        sizes = (self.page_size, self.num_kv_heads)
        return sizes == (other.page_size, other.num_kv_heads) and self.holds_same_heads(other)

    def holds_same_heads(self, other: "KVLayout") -> bool:
        """Return whether heads can be copied between both layouts; their number of heads may differ."""
        names = ("num_layers", "head_dim", "dtype", "itemsize", "layers")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    @classmethod
    def from_info(cls, info: LayoutInfo) -> "KVLayout":
        """Return the checked layout of a peer.

        Raises:
            ValueError: The layout is invalid; see the class.
        """
        return cls(**msgspec.structs.asdict(info))

    @override
    def __str__(self) -> str:
        heads = f"{self.num_kv_heads} KV heads x {self.head_dim}"
        if self.layers:
            heads = f"{self.num_kv_heads * self.head_dim} elements a token"
        return f"{self.num_layers} layers x {heads} {self.dtype}, {self.page_size} tokens a page"


@lru_cache(maxsize=64)
def _planes(layout: KVLayout) -> Planes:
    layers = _layers(layout)
    own = layout.num_kv_heads
    heads = [own * each.num_kv_heads if dim else 0 for each in layers for dim in _dims(each)]
    token_bytes = np.array([dim * layout.itemsize for each in layers for dim in _dims(each)])
    begin = _begins(layout)
    strips = layout.strips or (Strip(0, layout.page_bytes, len(heads)),)
    counts = [strip.num_planes for strip in strips]
    first = np.repeat(np.cumsum([0, *counts[:-1]]), counts)  # first plane of each plane's strip
    base = np.repeat([strip.base for strip in strips], counts) + begin[:-1] - begin[first]
    stride = np.repeat([strip.stride for strip in strips], counts)
    base, stride = base.astype(np.int64), stride.astype(np.int64)
    num_heads, token_bytes = np.array(heads, np.int64), token_bytes.astype(np.int64)
    step = _layer_step(base, np.diff(begin), stride, num_heads, token_bytes)
    return Planes(begin, base, stride, num_heads, token_bytes, step)


def _layer_step(base: Int64s, *alike: Int64s) -> int | None:
    """Return the bytes from each layer to the next; None if they or the layers differ."""
    steps = base[2:] - base[:-2]
    is_alike = all((each[2:] == each[:-2]).all() for each in alike)
    if not is_alike or (len(steps) and (steps != steps[0]).any()):
        return None
    return int(steps[0]) if len(steps) else 0


def _begins(layout: KVLayout) -> Int64s:
    head_bytes = layout.num_kv_heads * layout.itemsize * layout.page_size
    sizes = [
        each.num_kv_heads * dim * head_bytes for each in _layers(layout) for dim in _dims(each)
    ]
    return np.cumsum([0, *sizes], dtype=np.int64)


def _layers(layout: KVLayout) -> Sequence[LayerKV]:
    """Return the shape of one of the layout's heads in each layer."""
    alike = LayerKV(1, layout.head_dim, layout.head_dim)
    return layout.layers or (alike,) * layout.num_layers


def _dims(layer: LayerKV) -> tuple[int, int]:
    return layer.key_dim, layer.value_dim
