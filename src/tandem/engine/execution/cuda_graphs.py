"""Records decode-only forwards as CUDA graphs and replays them: a step is one launch instead of a thousand.

```
 inputs ── more than one row per sequence ────────────────────────────────────▶ ModelRunner.forward
    └──── decodes only ── pad to the next recorded size ── copy into the buffers ── replay ──▶ logits
```

There is a graph for each of a few batch sizes. All graphs use the same buffers at fixed addresses, including one for
logits: separate logits for each size would take a gigabyte. Padding rows of a batch read and write the scratch page,
which belongs to no request, and their logits are dropped.

CUDA is used only through `Capture`; everything else runs, and is tested, without a GPU.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tandem.engine.attention.paged import (
    AttentionBackend,
    GraphBackend,
    PagedBatch,
    PagedModel,
)
from tandem.engine.config import EngineOptions
from tandem.engine.device import to_device
from tandem.engine.execution.runner import ModelRunner, Runner, with_sampled
from tandem.engine.pages.pool import KVPool
from tandem.engine.scheduling.forward import ForwardInputs, OnLayerWritten
from tandem.engine.shape import ModelShape
from tandem.telemetry import log as logs
from tandem.wire.errors import ConfigInvalid

log = logs.get_logger(__name__)

# Repeats a computation. Each call overwrites the previous result, at the same address.
Replay = Callable[[], torch.Tensor]
# Runs a computation at least once to warm up, records it, and returns a function that repeats it.
Capture = Callable[[Callable[[], torch.Tensor]], Replay]


@dataclass(slots=True, eq=False)
class _Graph:
    """One recorded batch size."""

    size: int
    batch: PagedBatch
    replay: Replay


class GraphRunner:
    """A `Runner` that replays a recorded forward if there is one for the batch.

    The logits of a replay are valid until the next forward.

    Args:
        runner: Its pool must have the scratch page, and its backend must be a `GraphBackend`.
        num_decodes: Sequences in the largest batch to record.
        num_pages: Pages of the longest sequence.
        scratch_page: Id of the page that `make_pool` adds.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        num_decodes: int,
        num_pages: int,
        scratch_page: int,
        capture: Capture,
    ) -> None:
        assert isinstance(runner.backend, GraphBackend), f"{runner.backend.name} cannot be recorded"
        self._runner = runner
        self._backend = runner.backend
        self._scratch_page = scratch_page
        device = runner.device
        # Rows: token ids, positions, pages to write to, offsets to write to.
        self._numbers = torch.zeros((4, num_decodes), dtype=torch.int64, device=device)
        self._rows = torch.arange(num_decodes, device=device)
        self._kv_lens = torch.ones(num_decodes, dtype=torch.int32, device=device)
        self._page_table = torch.full(
            (num_decodes, num_pages), scratch_page, dtype=torch.int32, device=device
        )
        self._numbers[2].fill_(scratch_page)
        self._logits: torch.Tensor | None = None  # shared by all graphs
        # The largest graph is recorded first, so that the others reuse its memory.
        sizes = batch_sizes(num_decodes)
        self._graphs = [self._record(size, capture) for size in reversed(sizes)][::-1]
        log.info("engine.graphs_recorded", sizes=sizes)

    @property
    def device(self) -> torch.device:
        """The runner's device."""
        return self._runner.device

    @property
    def pool(self) -> KVPool:
        """The pool, the scratch page included."""
        return self._runner.pool

    @torch.inference_mode()
    def forward(
        self,
        inputs: ForwardInputs,
        sampled: torch.Tensor | None = None,
        on_layer_written: OnLayerWritten | None = None,
    ) -> torch.Tensor:
        """Replay the forward if it is recorded, else run it. Replays have no prompts, so they report no layers."""
        graph = self._graph_for(inputs)
        if graph is None:
            return self._runner.forward(inputs, sampled, on_layer_written)
        self._load(inputs, sampled, graph)
        self._backend.prepare(graph.batch)
        logits = graph.replay()
        if len(inputs.logit_rows) == inputs.num_rows:
            return logits[: inputs.num_rows]
        return logits[to_device(inputs.logit_rows, self.device)]

    def _graph_for(self, inputs: ForwardInputs) -> _Graph | None:
        """Return the smallest graph that fits the batch, or None."""
        index = bisect_left(self._graphs, inputs.num_rows, key=lambda graph: graph.size)
        is_fitting = inputs.is_decode_only and inputs.page_table.shape[1] <= len(
            self._page_table[0]
        )
        return self._graphs[index] if is_fitting and index < len(self._graphs) else None

    def _load(self, inputs: ForwardInputs, sampled: torch.Tensor | None, graph: _Graph) -> None:
        """Copy the inputs into the buffers, and let padding rows refer to the scratch page."""
        num_rows, width = inputs.page_table.shape
        padding = graph.size - num_rows
        page_size = graph.batch.page_size
        numbers = np.zeros((4, graph.size), np.int64)
        numbers[2, num_rows:] = self._scratch_page
        numbers[:, :num_rows] = (
            inputs.token_ids,
            inputs.positions,
            inputs.write_pages(page_size),
            inputs.positions % page_size,
        )
        self._numbers[:, : graph.size].copy_(to_device(numbers, self.device))
        ids = self._numbers[0, :num_rows]
        ids.copy_(with_sampled(ids, inputs, sampled))
        kv_lens = np.pad(inputs.kv_lens, (0, padding), constant_values=1)
        table = np.pad(
            inputs.page_table, ((0, padding), (0, 0)), constant_values=self._scratch_page
        )
        self._kv_lens[: graph.size].copy_(to_device(kv_lens, self.device))
        # Columns beyond the width hold valid page ids of earlier batches; no sequence is long enough to use them.
        self._page_table[: graph.size, :width].copy_(to_device(table, self.device))
        graph.batch.host_kv_lens, graph.batch.host_page_table = kv_lens, table

    def _record(self, size: int, capture: Capture) -> _Graph:
        token_ids, positions, write_pages, write_offsets = self._numbers[:, :size]
        batch = PagedBatch(
            backend=self._backend,
            pool=self._runner.pool,
            num_decodes=size,
            page_table=self._page_table[:size],
            kv_lens=self._kv_lens[:size],
            write_pages=write_pages,
            write_offsets=write_offsets,
            host_page_table=np.full((size, 1), self._scratch_page, np.int32),
            host_kv_lens=np.ones(size, np.int32),
            host_query_starts=np.arange(size + 1, dtype=np.int32),
        )

        @torch.inference_mode()
        def compute() -> torch.Tensor:
            logits = self._runner.compute(token_ids, positions, self._rows[:size], batch)
            # The first call is the warm-up of the largest batch, so this allocation is not recorded.
            if self._logits is None:
                self._logits = torch.empty_like(logits)
            return self._logits[:size].copy_(logits)

        log.info("engine.graph_recording", batch_size=size)
        try:
            return _Graph(size, batch, capture(compute))
        except torch.cuda.OutOfMemoryError as error:
            raise ConfigInvalid(
                "the GPU has too little memory for the CUDA graphs: lower --mem-fraction-static or "
                "--max-running-requests, or set --enforce-eager"
            ) from error
        except RuntimeError as error:
            # Some models read values from the device, such as those whose RoPE depends on the length.
            raise ConfigInvalid(
                f"this model's forward cannot be recorded ({str(error).splitlines()[0]}): set "
                "--enforce-eager"
            ) from error


class CudaCapture:
    """Records CUDA graphs that share a memory pool; they never run at the same time."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Replay:
        """Warm up on a separate stream, as CUDA requires, and record."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            result = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


def batch_sizes(largest: int) -> list[int]:
    """Return the batch sizes to record: 1, 2, 4, multiples of 8 and `largest`, as in SGLang."""
    sizes = [1, 2, 4, *range(8, largest + 1, 8), largest]
    return sorted({size for size in sizes if size <= largest})


def is_recording(config: EngineOptions, backend: AttentionBackend) -> bool:
    """Return whether graphs can be recorded; `make_runner` does so if the pool has a scratch page."""
    is_gpu = config.device.split(":", maxsplit=1)[0] == "cuda"
    return is_gpu and not config.is_eager and isinstance(backend, GraphBackend)


def make_runner(
    model: PagedModel,
    pool: KVPool,
    backend: AttentionBackend,
    config: EngineOptions,
    shape: ModelShape,
    *,
    num_pages: int,
) -> Runner:
    """Return the fastest runner for a model.

    Args:
        pool: Has a scratch page if decode-only forwards are to be recorded.
        num_pages: Number of pages, not counting the scratch page.

    Raises:
        ConfigInvalid: The graphs cannot be recorded; the message gives the reason.
    """
    runner = ModelRunner(model, pool, backend)
    if len(pool) == num_pages or not is_recording(config, backend):
        return runner
    longest = min(shape.context_length, num_pages * config.page_size)
    return GraphRunner(
        runner,
        num_decodes=config.max_running_requests,
        num_pages=-(-longest // config.page_size),
        scratch_page=num_pages,
        capture=CudaCapture(),
    )
