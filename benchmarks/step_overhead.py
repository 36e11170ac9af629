"""The CPU time of the engine's loop per step, without the device's work.

The benchmark runs the unmodified loop of a node: inbox, admission, batch, inputs, sampling, delivery, one
message to the edge worker. Only the forward is replaced: it always returns the same logits. The vocabulary has
128 tokens, because argmax and sums over a real vocabulary are the device's work. The result is the median CPU time
of the loop's thread per step. Run from the repository's root: `python -m benchmarks.step_overhead`.
"""

import argparse
import statistics
import threading
import time

import torch

from benchmarks.rig import parse, parser_of, result
from tandem.decode.role import DecodeRole
from tandem.engine.config import EngineOptions
from tandem.engine.execution.launcher import ModelLauncher
from tandem.engine.scheduling.core import Engine
from tandem.engine.scheduling.forward import ForwardInputs, OnLayerWritten
from tandem.engine.shape import ModelShape
from tandem.node.answers import Answers
from tandem.node.loop import EngineLoop
from tandem.wire.channel import Inbox, Link, Waker, wait
from tandem.wire.errors import PeerLost
from tandem.wire.generation import Epoch, GenerateRequest, RequestId, SamplingParams
from tandem.wire.messages import FromEngine, Ping, StartColocated, ToEngine

VOCAB_SIZE = 128
PAGE_SIZE = 16
PROMPT_TOKENS = 16
# Goals by batch size: 1 % of the step time of a large model on a GPU.
GOALS_MS = {64: 0.5, 256: 2.0}


class FreeRunner:
    """A runner whose forward takes no time."""

    device = torch.device("cpu")

    def __init__(self, most_rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._logits = torch.randn(most_rows, VOCAB_SIZE, generator=generator)

    def forward(
        self,
        inputs: ForwardInputs,
        sampled: torch.Tensor | None = None,
        on_layer_written: OnLayerWritten | None = None,
    ) -> torch.Tensor:
        """Return precomputed logits."""
        del sampled
        return self._logits[: len(inputs.logit_rows)]


def build_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = parser_of(
        "step_overhead", "Measure the CPU time of the engine's loop per step, without the forward."
    )
    add = parser.add_argument
    add(
        "--batches",
        type=int,
        nargs="+",
        default=[1, 16, 64, 256, 1024],
        help="batch sizes to measure",
    )
    add("--steps", type=int, default=200, help="steps per batch size; the median is reported")
    return parser


def make_engine(batch: int, steps: int) -> Engine:
    """Return an engine whose pool holds the batch for all steps."""
    pages_each = -(-(PROMPT_TOKENS + 2 * steps) // PAGE_SIZE) + 1
    shape = ModelShape(
        num_layers=1,
        num_kv_heads=1,
        head_dim=64,
        vocab_size=VOCAB_SIZE,
        context_length=8192,
        eos_token_ids=frozenset({0}),
        dtype="bfloat16",
        kv_dtype="bfloat16",
        fingerprint="free",
    )
    config = EngineOptions(
        page_size=PAGE_SIZE,
        max_running_requests=batch,
        chunked_prefill_size=batch * PROMPT_TOKENS,
    )
    launcher = ModelLauncher(FreeRunner(batch), shape, PAGE_SIZE)
    return Engine(launcher, shape, config, batch * pages_each)


def step_ms(batch: int, steps: int, sampling: SamplingParams) -> float:
    """Return the median CPU milliseconds of one pass of the loop with `batch` running requests."""
    inbox: Inbox[ToEngine] = Inbox("tcp://127.0.0.1:0", ToEngine)
    answers, waker = Answers(inbox, Epoch(1)), Waker()
    engine = make_engine(batch, steps)
    role = DecodeRole(engine, None, answers, batch, batch)
    loop = EngineLoop(role, inbox, answers, waker, log_interval_s=1e9)
    done = threading.Event()
    edge = threading.Thread(target=_edge, args=(inbox.port, batch, sampling, done))
    edge.start()
    while engine.num_running < batch or engine.num_waiting:
        loop.run_once(0.01)
    times = []
    for _ in range(steps):
        begin = time.thread_time()
        loop.run_once(0.0)
        times.append(time.thread_time() - begin)
    assert engine.num_running == batch, "requests ended before the measurement"
    done.set()
    edge.join()
    inbox.close()
    return statistics.median(times) * 1000


def _edge(port: int, batch: int, sampling: SamplingParams, done: threading.Event) -> None:
    """Send all requests, then read the answers until `done` is set."""
    link: Link[FromEngine] = Link(f"tcp://127.0.0.1:{port}", FromEngine)
    while not _is_sent(link, Ping()):
        time.sleep(0.01)
    for i in range(batch):
        prompt = [1 + (i + j) % (VOCAB_SIZE - 1) for j in range(PROMPT_TOKENS)]
        request = GenerateRequest(
            request_id=RequestId(f"request-{i:026d}"), prompt_ids=prompt, sampling=sampling
        )
        link.send(StartColocated(request=request))
    while not done.is_set():
        wait([link], 0.2)
        link.send(Ping())
        while link.receive() is not None:
            pass
    link.close()


def _is_sent(link: Link[FromEngine], message: Ping) -> bool:
    try:
        link.send(message)
    except PeerLost:  # not connected yet
        return False
    return True


def main() -> None:
    """Run the benchmark."""
    args = parse(build_parser(), {"batches": [64], "steps": 20})
    torch.set_num_threads(1)
    num_new = 2 * args.steps
    kinds = {
        "greedy": SamplingParams(temperature=0, max_new_tokens=num_new, ignore_eos=True),
        "sampled": SamplingParams(
            temperature=0.8, top_p=0.95, seed=1, max_new_tokens=num_new, ignore_eos=True
        ),
    }
    print("median CPU milliseconds per step, without the forward")
    print(f"{'requests':>9}" + "".join(f"{name:>10}" for name in kinds))
    found: dict[int, float] = {}
    for batch in args.batches:
        times = [step_ms(batch, args.steps, sampling) for sampling in kinds.values()]
        found[batch] = times[0]
        print(f"{batch:>9}" + "".join(f"{ms:>10.3f}" for ms in times), flush=True)
    for batch, goal in GOALS_MS.items():
        if batch in found:
            name = f"step_overhead_at_{batch}"
            print(result(name, found[batch], goal, "ms", is_lower_better=True))


if __name__ == "__main__":
    main()
