import pytest

from kvtransfer.layout import KVLayout

LAYOUT = KVLayout(
    num_pages=10, page_size=4, num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", itemsize=4
)


def test_a_page_holds_k_and_v_of_every_layer_head_and_token():
    assert LAYOUT.page_bytes == 3 * 2 * 2 * 4 * 8 * 4
    assert LAYOUT.pool_bytes == 10 * LAYOUT.page_bytes


def test_a_layout_crosses_the_wire_unchanged():
    assert KVLayout.from_info(LAYOUT.to_info()) == LAYOUT


def test_a_layout_of_nothing_is_refused_naming_the_field():
    with pytest.raises(ValueError, match="head_dim"):
        KVLayout(1, 1, 1, 1, 0, "float32", 4)
