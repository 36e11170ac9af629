"""How large a pool is going to be."""

from dataclasses import dataclass

from engine.shape import ModelShape
from kvtransfer.layout import KVLayout


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What a role needs to make memory for a pool.

    Attributes:
        has_scratch_page: One page more lies behind those counted; see `make_pool`.
    """

    shape: ModelShape
    num_pages: int
    page_size: int
    has_scratch_page: bool = False

    @property
    def layout(self) -> KVLayout:
        """The pool as transfer sees it."""
        return KVLayout(
            num_pages=self.num_pages,
            page_size=self.page_size,
            num_layers=self.shape.num_layers,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            dtype=self.shape.kv_dtype,
            itemsize=self.shape.kv_item_bytes,
        )

    @property
    def memory_bytes(self) -> int:
        """Return what the pool takes."""
        return self.layout.pool_bytes + self.has_scratch_page * self.layout.page_bytes
