"""How large a pool is going to be."""

from dataclasses import dataclass

from tandem.engine.shape import ModelShape
from tandem.kvtransfer.layout import KVLayout


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
        shape = self.shape
        return KVLayout.of_layers(
            self.num_pages, self.page_size, shape.kv_layers, shape.kv_dtype, shape.kv_item_bytes
        )

    @property
    def memory_bytes(self) -> int:
        """Return what the pool takes."""
        return self.layout.pool_bytes + self.has_scratch_page * self.layout.page_bytes
