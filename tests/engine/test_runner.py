"""Reports of written layers: at once on a CPU, and when the stream reaches them on a device."""

import threading

import pytest
import structlog
import torch

from tandem.engine.execution.runner import LayerEvents
from tests.device_events import BrokenEvent, FakeEvent, PassedEvent
from tests.engine.test_core import PAGE, make_engine
from tests.one_engine import ask
from tests.patience import PATIENCE_S
from tests.tiny_models import SIZES


def test_layer_is_reported_once_the_device_reaches_its_event():
    made, told, has_told = [], [], threading.Semaphore(0)

    def on_layer_written(layer: int) -> None:
        told.append(layer)
        has_told.release()

    events = LayerEvents(lambda: made.append(FakeEvent()) or made[-1])
    queued = events.after(on_layer_written)
    for layer in range(3):
        queued(layer)
    assert told == []
    made[1].passed.set()
    made[0].passed.set()
    assert has_told.acquire(timeout=PATIENCE_S)
    assert has_told.acquire(timeout=PATIENCE_S)
    assert told == [0, 1]
    made[2].passed.set()
    assert has_told.acquire(timeout=PATIENCE_S)


def bug(_layer: int) -> None:
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize(("event", "on_layer_written"), [(PassedEvent, bug), (BrokenEvent, print)])
def test_failed_layer_report_is_logged_once_and_later_forwards_report(event, on_layer_written):
    kinds, told, has_told = iter([event] * 3), [], threading.Event()
    events = LayerEvents(lambda: next(kinds, PassedEvent)())  # noqa: PLW0108 - the class differs from call to call
    with structlog.testing.capture_logs() as logged:
        failing, next_forward = events.after(on_layer_written), events.after(told.append)
        for layer in range(3):
            failing(layer)
        next_forward(0)
        events.after(lambda _layer: has_told.set())(0)
        assert has_told.wait(PATIENCE_S)
    assert told == [0]
    assert [(line["event"], line["layer"]) for line in logged] == [("layers.report_failed", 0)]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_reported_layer_is_in_the_pool(tiny_model, backend):
    engine = make_engine(tiny_model("llama"), attention_backend=backend)
    pool = engine._launcher._runner.pool.pages
    begun, seen = [], []

    def by_layer(ids):
        return pool[ids].view(len(ids), SIZES["num_hidden_layers"], -1)

    def begin(pages):
        assert not begun or pages[0].first_page == begun[-1][0].first_page + len(
            begun[-1][0].page_ids
        )
        begun.append(pages)
        ids = torch.tensor(pages[0].page_ids)

        def on_layer_written(layer):
            seen.append((layer, by_layer(ids).clone()))

        return on_layer_written

    engine.watch_layers(begin)
    prompt = [3 + i % 300 for i in range(50)]  # chunks of 32 and 18: pages 0 ... 3, 4 ... 6
    active = engine.submit(ask(prompt), is_prompt_only=True)
    results = []
    while engine.has_work:
        results.append(engine.step())
    assert [result.pages for result in results] == begun
    assert [len(pages[0].page_ids) for pages in begun] == [4, 3]
    num_layers = SIZES["num_hidden_layers"]
    assert [layer for layer, _ in seen] == list(range(num_layers)) * 2
    for pages, told in zip(begun, (seen[:num_layers], seen[num_layers:]), strict=True):
        final = by_layer(torch.tensor(pages[0].page_ids))
        for layer, at_the_time in told:
            # Layers up to this one have their final content, and later ones are not written yet.
            assert torch.equal(at_the_time[:, : layer + 1], final[:, : layer + 1])
            assert not at_the_time[:, layer + 1 :].any()
    assert final.any()
    assert len(active.page_ids) * PAGE >= len(prompt)
    engine.release(active)
