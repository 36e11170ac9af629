"""The shape of a page of KV and of a pool of them. No memory, no copies."""

from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tandem.wire.hand_off import LayerKV, LayoutInfo

# 256 TiB, as much as a process can address. Beyond it no layout is meant, and offsets would not be int64.
MAX_POOL_BYTES = 1 << 48


Int64s = NDArray[np.int64]


class Planes(NamedTuple):
    """K and V of every layer, as they lie in a page: plane 2 i is K of layer i, 2 i + 1 its V.

    Attributes:
        begin: First byte of each plane in a page, and one past the last. Shape (2 * num_layers + 1,).
        num_heads: 0 for a plane that holds nothing. Shape (2 * num_layers,).
        token_bytes: Of one token in one head. Shape (2 * num_layers,).
    """

    begin: Int64s
    num_heads: Int64s
    token_bytes: Int64s


class KVLayout(LayoutInfo, frozen=True):
    """A layout that can be: what a peer sends is a `LayoutInfo`.

    Raises:
        ValueError: A size is not positive, the layers contradict the sums, or the pool is larger
            than any.
    """

    @classmethod
    def of_layers(
        cls, num_pages: int, page_size: int, layers: tuple[LayerKV, ...], dtype: str, itemsize: int
    ) -> "KVLayout":
        """Return the layout of a model whose layers keep these."""
        first = layers[0]
        if all(layer == first for layer in layers) and first.key_dim == first.value_dim:
            heads, dim = first.num_kv_heads, first.key_dim
            return cls(num_pages, page_size, len(layers), heads, dim, dtype, itemsize)
        dim = sum(each.num_kv_heads * (each.key_dim + each.value_dim) for each in layers)
        return cls(num_pages, page_size, len(layers), 1, dim, dtype, itemsize, layers)

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1")
        if self.layers:
            self._check_layers()
        if self.pool_bytes > MAX_POOL_BYTES:
            raise ValueError(f"a pool of {self.pool_bytes} bytes, more than a process can address")

    def _check_layers(self) -> None:
        """Raise ValueError unless the layers are as many and as large as the rest reports."""
        if len(self.layers) != self.num_layers or self.num_kv_heads != 1:
            raise ValueError(f"{len(self.layers)} layers are described, {self.num_layers} reported")
        if any(min(each.num_kv_heads, each.key_dim, each.value_dim) < 0 for each in self.layers):
            raise ValueError("a layer has a negative size")
        if any(each.num_kv_heads == 0 and (each.key_dim or each.value_dim) for each in self.layers):
            raise ValueError("a layer without heads has a size")
        dim = sum(each.num_kv_heads * (each.key_dim + each.value_dim) for each in self.layers)
        if dim != self.head_dim:
            raise ValueError(f"layers of {dim} elements a token, {self.head_dim} reported")

    @property
    def all_heads_bytes(self) -> int:
        """Bytes of one token in every layer and head, K and V."""
        return self.page_bytes // self.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: all layers, K and V."""
        factor = 1 if self.layers else 2 * self.num_layers * self.num_kv_heads
        return factor * self.page_size * self.head_dim * self.itemsize

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_pages * self.page_bytes

    @property
    def planes(self) -> Planes:
        """Where K and V of each layer lie in a page."""
        return _planes(self)

    def bytes_of_layers(self, layers: range) -> slice:
        """Return where the layers' K and V lie in a page; they lie together. Step 1."""
        begin = self.planes.begin
        return slice(int(begin[2 * layers.start]), int(begin[2 * layers.stop]))

    def has_same_pages(self, other: "KVLayout") -> bool:
        """Tell whether a page of one is byte for byte a page of the other."""
        sizes = (self.page_size, self.num_kv_heads)
        return sizes == (other.page_size, other.num_kv_heads) and self.holds_same_heads(other)

    def holds_same_heads(self, other: "KVLayout") -> bool:
        """Tell whether a head can be copied between the two; how many each has may differ."""
        names = ("num_layers", "head_dim", "dtype", "itemsize", "layers")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    @classmethod
    def from_info(cls, info: LayoutInfo) -> "KVLayout":
        """Check a layout that came over the wire.

        Raises:
            ValueError: See the class.
        """
        return cls(**msgspec.structs.asdict(info))

    @override
    def __str__(self) -> str:
        heads = (
            f"{self.head_dim} elements a token"
            if self.layers
            else f"{self.num_kv_heads} KV heads x {self.head_dim}"
        )
        return f"{self.num_layers} layers x {heads} {self.dtype}, {self.page_size} tokens a page"


@lru_cache(maxsize=64)
def _planes(layout: KVLayout) -> Planes:
    alike = LayerKV(layout.num_kv_heads, layout.head_dim, layout.head_dim)
    layers = layout.layers or (alike,) * layout.num_layers
    heads = [each.num_kv_heads if dim else 0 for each in layers for dim in _dims(each)]
    token_bytes = np.array([dim * layout.itemsize for each in layers for dim in _dims(each)])
    sizes = np.array(heads) * token_bytes * layout.page_size
    begin = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Planes(begin, np.array(heads, np.int64), token_bytes.astype(np.int64))


def _dims(layer: LayerKV) -> tuple[int, int]:
    return layer.key_dim, layer.value_dim
