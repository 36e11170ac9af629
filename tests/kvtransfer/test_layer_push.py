from tandem.kvtransfer.agents.sender_rooms import PageRun, layers_per_push, push_by_layer
from tandem.kvtransfer.layout import KVLayout
from tandem.wire.generation import Room

LAYOUT = KVLayout(64, 16, 8, 2, 4, "float32", 4)  # 1 KiB a layer of a page
RUNS = [PageRun(Room(1), [5, 6], 0), PageRun(Room(2), [7], 3)]


def pushes_of(min_bytes: int, layers=range(8)) -> list[tuple]:
    pushed = []
    on_layer_written = push_by_layer(
        lambda room, page_ids, first, layers: pushed.append((room, page_ids, first, layers)),
        RUNS,
        LAYOUT,
        min_bytes,
    )
    for layer in layers:
        on_layer_written(layer)
    return pushed


def test_each_run_is_pushed_up_to_the_layer_that_was_written():
    assert pushes_of(1)[:4] == [
        (1, [5, 6], 0, range(1)),
        (2, [7], 3, range(1)),
        (1, [5, 6], 0, range(2)),
        (2, [7], 3, range(2)),
    ]


def test_layers_are_combined_up_to_the_minimum_push_size():
    assert [push[3].stop for push in pushes_of(9 << 10)[::2]] == [3, 6, 7, 8]
    assert [push[3].stop for push in pushes_of(1 << 30)[::2]] == [8]
    assert layers_per_push([], LAYOUT, 1) == 8


def test_last_pushes_halve_down_to_a_quarter_of_the_minimum_size():
    assert [push[3].stop for push in pushes_of(20 << 10)[::2]] == [4, 6, 8]
    assert [push[3].stop for push in pushes_of(36 << 10)[::2]] == [4, 7, 8]


def test_forward_that_reports_few_layers_is_pushed_up_to_the_last_reported():
    assert [push[3].stop for push in pushes_of(1, [0, 5])[::2]] == [1, 6]
