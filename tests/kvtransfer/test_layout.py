import msgspec
import pytest
from msgspec.structs import replace

from tandem.kvtransfer.layout import KVLayout
from tandem.wire.hand_off import LayerKV, LayoutInfo

LAYOUT = KVLayout(
    num_pages=10, page_size=4, num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", itemsize=4
)


def test_a_page_holds_k_and_v_of_every_layer_head_and_token():
    assert LAYOUT.page_bytes == 3 * 2 * 2 * 4 * 8 * 4
    assert LAYOUT.pool_bytes == 10 * LAYOUT.page_bytes


@pytest.mark.parametrize("of", ["equal layers", "layers that differ"])
def test_a_layout_crosses_the_wire_unchanged(of):
    layout = {"equal layers": LAYOUT, "layers that differ": UNEVEN}[of]
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=LayoutInfo)
    assert KVLayout.from_info(sent) == layout


def test_a_layout_of_nothing_is_refused_naming_the_field():
    with pytest.raises(ValueError, match="head_dim"):
        KVLayout(1, 1, 1, 1, 0, "float32", 4)


UNEVEN = KVLayout.of_layers(10, 4, (LayerKV(1, 12, 0), LayerKV(2, 4, 3)), "float32", 4)


def test_layers_that_differ_are_counted_each_by_its_own_size():
    assert UNEVEN.page_bytes == (12 + 2 * 4 + 2 * 3) * 4 * 4
    assert UNEVEN.bytes_of_layers(range(1, 2)) == slice(12 * 16, UNEVEN.page_bytes)


def test_layers_that_are_alike_need_no_list_of_them():
    assert not KVLayout.of_layers(10, 4, (LayerKV(2, 8, 8),) * 3, "float32", 4).layers


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 3},
        {"head_dim": 25},
        {"num_kv_heads": 2},
        {"layers": (LayerKV(-1, 1, 1),) * 2},
        {"layers": (LayerKV(0, 1 << 80, 0), UNEVEN.layers[1]), "head_dim": 14},
    ],
)
def test_layers_that_contradict_their_sums_are_refused(change):
    with pytest.raises(ValueError, match=r"layer|elements"):
        replace(UNEVEN, **change)
