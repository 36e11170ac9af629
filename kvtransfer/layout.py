"""The shape of a page of KV and of a pool of them. No memory, no copies."""

from dataclasses import asdict, dataclass, fields

from typing_extensions import override

from wire.hand_off import LayoutInfo

# 256 TiB, as much as a process can address. Beyond it no layout is meant, and offsets would not be int64.
MAX_POOL_BYTES = 1 << 48


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A pool of pages, C-contiguous as [page][layer][k, v][head][token][element].

    Attributes:
        page_size: Tokens in a page.
        num_kv_heads: Heads that this process holds (a shard of the model's, under tensor parallelism).
        dtype: Name of the element type; only compared.
        itemsize: Bytes of one element.
    """

    num_pages: int
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    itemsize: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < 1:
                raise ValueError(f"{field.name} is {value}, must be at least 1")
        if self.pool_bytes > MAX_POOL_BYTES:
            raise ValueError(f"a pool of {self.pool_bytes} bytes, more than a process can address")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one head of one layer's K or V: the smallest run that is copied."""
        return self.head_dim * self.itemsize

    @property
    def all_heads_bytes(self) -> int:
        """Bytes of one token in every layer and head, K and V."""
        return self.num_layers * 2 * self.num_kv_heads * self.token_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one layer's K or V in one page."""
        return self.page_size * self.token_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's K and V in one page; they lie together."""
        return 2 * self.num_kv_heads * self.head_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: all layers, K and V."""
        return self.num_layers * self.layer_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_pages * self.page_bytes

    def has_same_pages(self, other: "KVLayout") -> bool:
        """Tell whether a page of one is byte for byte a page of the other."""
        return self.page_size == other.page_size and self.holds_same_tokens(other)

    def holds_same_tokens(self, other: "KVLayout") -> bool:
        """Tell whether tokens can be copied between the two; their page sizes may differ."""
        return self.num_kv_heads == other.num_kv_heads and self.holds_same_heads(other)

    def holds_same_heads(self, other: "KVLayout") -> bool:
        """Tell whether a head can be copied between the two; how many each has may differ."""
        return self.head_shape == other.head_shape

    @property
    def head_shape(self) -> tuple[int, int, str, int]:
        """Everything that the bytes of one token in one head depend on."""
        return (self.num_layers, self.head_dim, self.dtype, self.itemsize)

    def to_info(self) -> LayoutInfo:
        """Return the travelling form."""
        return LayoutInfo(**asdict(self))

    @classmethod
    def from_info(cls, info: LayoutInfo) -> "KVLayout":
        """Rebuild a layout that came over the wire.

        Raises:
            ValueError: A size is not positive, or the pool larger than any.
        """
        return cls(**{field.name: getattr(info, field.name) for field in fields(cls)})

    @override
    def __str__(self) -> str:
        return (
            f"{self.num_layers} layers x {self.num_kv_heads} KV heads x {self.head_dim} "
            f"{self.dtype}, {self.page_size} tokens a page"
        )
