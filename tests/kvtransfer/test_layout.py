import msgspec
import pytest
from msgspec.structs import replace

from tandem.kvtransfer.layout import KVLayout
from tandem.wire.hand_off import LayerKV, LayoutInfo, Strip

LAYOUT = KVLayout(
    num_pages=10, page_size=4, num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", itemsize=4
)


def test_a_page_holds_k_and_v_of_every_layer_head_and_token():
    assert LAYOUT.page_bytes == 3 * 2 * 2 * 4 * 8 * 4
    assert LAYOUT.pool_bytes == 10 * LAYOUT.page_bytes


@pytest.mark.parametrize("of", ["equal layers", "layers that differ", "strips"])
def test_a_layout_crosses_the_wire_unchanged(of):
    layout = {"equal layers": LAYOUT, "layers that differ": UNEVEN, "strips": STRIPS}[of]
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=LayoutInfo)
    assert KVLayout.from_info(sent) == layout


def test_layout_with_a_zero_size_is_refused_with_the_field():
    with pytest.raises(ValueError, match="head_dim"):
        KVLayout(1, 1, 1, 1, 0, "float32", 4)


UNEVEN = KVLayout.of_layers(10, 4, (LayerKV(1, 12, 0), LayerKV(2, 4, 3)), "float32", 4)

# A page of the first layer has 192 bytes, one of the second 224.
STRIPS = replace(UNEVEN, strips=(Strip(64, 200, 2), Strip(2064, 224, 2)))


def test_a_pool_of_strips_ends_with_the_last_page():
    assert STRIPS.pool_bytes == 2064 + 10 * 224


@pytest.mark.parametrize(
    "strips",
    [
        (Strip(0, 192, 2),),
        (Strip(0, 191, 2), Strip(2064, 224, 2)),
        (Strip(64, 250, 2), Strip(2064, 224, 2)),
        (Strip(-64, 192, 2), Strip(2064, 224, 2)),
        (Strip(0, 1 << 60, 2), Strip(2064, 224, 2)),
        (Strip(2240, 192, 2), Strip(0, 224, 2)),
        (Strip(0, 416, 5), Strip(5000, 224, -1)),
        (Strip(0, 192, 1), Strip(2000, 1, 1), Strip(3000, 224, 2)),
    ],
)
def test_strips_that_overlap_or_do_not_hold_a_page_are_refused(strips):
    with pytest.raises(ValueError, match="strip"):
        replace(UNEVEN, strips=strips)


def test_layers_that_differ_are_counted_each_by_its_own_size():
    assert UNEVEN.page_bytes == (12 + 2 * 4 + 2 * 3) * 4 * 4
    assert UNEVEN.planes.begin.tolist()[2:] == [12 * 16, 20 * 16, UNEVEN.page_bytes]


def test_heads_of_layers_that_differ_divide_each_of_them():
    layout = replace(UNEVEN, num_kv_heads=3)
    assert layout.page_bytes == 3 * UNEVEN.page_bytes
    assert layout.planes.num_heads.tolist() == [3, 0, 6, 6]
    assert layout.holds_same_heads(UNEVEN)
    assert not layout.has_same_pages(UNEVEN)


@pytest.mark.parametrize("field", ["num_pages", "num_kv_heads", "head_dim"])
def test_pool_larger_than_an_address_space_is_refused(field):
    alike = replace(LAYOUT, strips=(Strip(0, 1 << 40, 6),))
    with pytest.raises(ValueError, match="more than a process can address"):
        replace(alike, **{field: 1 << 62})


def test_layers_that_are_alike_need_no_list_of_them():
    assert not KVLayout.of_layers(10, 4, (LayerKV(2, 8, 8),) * 3, "float32", 4).layers


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 3},
        {"head_dim": 25},
        {"layers": (LayerKV(-1, 1, 1),) * 2},
        {"layers": (LayerKV(0, 1 << 80, 0), UNEVEN.layers[1]), "head_dim": 14},
    ],
)
def test_layers_that_contradict_their_sums_are_refused(change):
    with pytest.raises(ValueError, match=r"layer|elements"):
        replace(UNEVEN, **change)
