"""Padding, buffers and choice of graphs, with fake graphs that call the function again."""

import numpy as np
import pytest
import torch

from tandem.engine.attention.paged import PagedBatch
from tandem.engine.attention.torch import TorchAttention
from tandem.engine.config import EngineConfig, EngineOptions
from tandem.engine.execution.cuda_graphs import GraphRunner, batch_sizes, is_recording
from tandem.engine.execution.launcher import ModelLauncher
from tandem.engine.execution.runner import ModelRunner
from tandem.engine.model.loading import load_model
from tandem.engine.pages.pool import KVPool, make_pool
from tandem.engine.scheduling.core import Engine
from tandem.engine.scheduling.forward import ForwardInputs
from tandem.wire.errors import ConfigInvalid
from tests.engine.test_core import PAGE, prompts
from tests.one_engine import ask, run

NUM_PAGES = 60


class RecordableTorch(TorchAttention):
    """The reference backend, which uses the host arrays of a recorded batch."""

    def __init__(self) -> None:
        self.prepared: list[PagedBatch] = []

    def prepare(self, batch: PagedBatch) -> None:
        self.prepared.append(batch)
        batch.scratch.clear()


class Recorder:
    """Counts replays by batch size."""

    def __init__(self) -> None:
        self.replays: list[int] = []

    def __call__(self, compute):
        size = len(compute())

        def replay() -> torch.Tensor:
            self.replays.append(size)
            return compute()

        return replay


class Rig:
    """A graph runner and a plain runner over equal pools."""

    def __init__(self, path, num_decodes=6, backend=None, capture=None) -> None:
        self.config = EngineConfig(model_dir=str(path), dtype="float32", page_size=PAGE)
        self.model, self.shape = load_model(self.config)
        self.recorder, self.backend = Recorder(), backend or RecordableTorch()
        pool = make_pool(self.shape, NUM_PAGES, PAGE, "cpu", has_scratch_page=True)
        generator = torch.Generator().manual_seed(0)
        pool.pages.copy_(torch.randn(pool.pages.shape, generator=generator))
        other = KVPool(pool.pages.clone(), self.shape, PAGE)
        self.plain = ModelRunner(self.model, other, TorchAttention())
        self.graphs = GraphRunner(
            ModelRunner(self.model, pool, self.backend),
            num_decodes=num_decodes,
            num_pages=8,
            scratch_page=NUM_PAGES,
            capture=capture or self.recorder,
        )


def decodes(kv_lens, token_ids=None, sources=None, logit_rows=None) -> ForwardInputs:
    num = len(kv_lens)
    width = -(-max(kv_lens) // PAGE)
    return ForwardInputs(
        token_ids=np.array(token_ids or range(5, 5 + num)),
        sources=np.array(sources or [-1] * num),
        positions=np.array(kv_lens) - 1,
        query_starts=np.arange(num + 1, dtype=np.int32),
        kv_lens=np.array(kv_lens, np.int32),
        page_table=np.arange(num * width, dtype=np.int32).reshape(num, width),
        num_decodes=num,
        logit_rows=np.array(range(num) if logit_rows is None else logit_rows, np.int64),
    )


@pytest.fixture
def rig(tiny_model) -> Rig:
    return Rig(tiny_model("llama"))


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])],
)
def test_recorded_batch_sizes(largest, sizes):
    assert batch_sizes(largest) == sizes


@pytest.mark.parametrize(
    ("kv_lens", "size"), [([9], 1), ([9, 3], 2), ([9, 3, 17], 4), ([1, 8, 9, 16, 20], 6)]
)
def test_batch_padded_to_the_next_recorded_size_has_the_same_logits(rig, kv_lens, size):
    inputs = decodes(kv_lens)
    logits = rig.graphs.forward(inputs)
    torch.testing.assert_close(logits, rig.plain.forward(inputs))
    assert rig.recorder.replays == [size]
    assert rig.backend.prepared[-1].num_decodes == size


def test_padding_rows_write_only_to_the_scratch_page(rig):
    inputs = decodes([9, 3, 17])
    rig.graphs.forward(inputs)
    rig.plain.forward(inputs)
    torch.testing.assert_close(rig.graphs.pool.pages[:NUM_PAGES], rig.plain.pool.pages[:NUM_PAGES])


def test_small_batch_does_not_write_pages_of_a_previous_large_batch(rig):
    rig.graphs.forward(decodes([1, 8, 9, 16, 20]))
    before = rig.graphs.pool.pages.clone()
    small = decodes([2, 2, 2])
    rig.graphs.forward(small)
    changed = (rig.graphs.pool.pages != before).any(1).nonzero().flatten().tolist()
    assert set(changed) <= {*small.page_table.flatten().tolist(), NUM_PAGES}


def test_all_graphs_share_one_logits_buffer(rig):
    places = {rig.graphs.forward(decodes([3] * num)).data_ptr() for num in (1, 2, 3, 6)}
    assert rig.recorder.replays == [1, 2, 4, 6]
    assert len(places) == 1


def test_only_the_requested_logits_are_returned(rig):
    inputs = decodes([9, 3, 17], logit_rows=[0, 2])
    torch.testing.assert_close(rig.graphs.forward(inputs), rig.plain.forward(inputs))
    assert rig.graphs.forward(decodes([9, 3, 17], logit_rows=[])).shape[0] == 0


def test_ids_on_the_device_are_copied_before_the_replay(rig):
    inputs = decodes([9, 3, 17], token_ids=[7, 0, 0], sources=[-1, 1, 0])
    known = decodes([9, 3, 17], token_ids=[7, 21, 20])
    sampled = torch.tensor([20, 21])
    torch.testing.assert_close(rig.graphs.forward(inputs, sampled), rig.plain.forward(known))
    assert rig.recorder.replays == [4]


@pytest.mark.parametrize("kv_lens", [[1] * 7, [65]], ids=["too many rows", "too many pages"])
def test_batch_without_a_graph_runs_eagerly(rig, kv_lens):
    inputs = decodes(kv_lens)
    torch.testing.assert_close(rig.graphs.forward(inputs), rig.plain.forward(inputs))
    assert rig.recorder.replays == []


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (torch.cuda.OutOfMemoryError("full"), "--mem-fraction-static"),
        (RuntimeError("not permitted when stream is capturing"), "--enforce-eager"),
    ],
)
def test_model_that_cannot_be_recorded_is_refused_with_a_hint(tiny_model, error, hint):
    def capture(_compute):
        raise error

    with pytest.raises(ConfigInvalid, match=hint):
        Rig(tiny_model("llama"), capture=capture)


def test_engine_with_graphs_generates_the_same_tokens(tiny_model):
    answers = []
    for is_recorded in (False, True):
        rig = Rig(tiny_model("mistral"), num_decodes=4)
        rig.graphs.pool.pages.zero_()
        runner = rig.graphs if is_recorded else rig.plain
        launcher = ModelLauncher(runner, rig.shape, PAGE)
        engine = Engine(launcher, rig.shape, rig.config, NUM_PAGES)
        for i, prompt in enumerate(prompts(4)):
            engine.submit(ask(prompt, str(i), max_new_tokens=6))
        answers.append(run(engine))
        assert bool(rig.recorder.replays) == is_recorded
    assert answers[0] == answers[1]


def test_graphs_are_recorded_on_gpus_unless_disabled_or_unsupported():
    def config(**settings) -> EngineOptions:
        return EngineOptions(**settings)

    assert is_recording(config(device="cuda:0"), RecordableTorch())
    assert not is_recording(config(device="cuda:0", is_eager=True), RecordableTorch())
    assert not is_recording(config(device="cuda:0"), TorchAttention())
    assert not is_recording(config(), RecordableTorch())
