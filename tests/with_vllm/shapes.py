"""The shapes of models and settings that nodes with vLLM serve or refuse: one list for the tests and for the table of docs/vllm.md.

A served shape answers 40 prompts one by one, then again from the cache, and the same 16 at once. Every answer is compared
with that of vLLM in one process. For the table, one of two decode nodes is then killed under eight streams.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tandem.cli.up import free_ports
from tandem.wire.errors import ConfigInvalid
from tests.with_vllm.models import prompts, tiny, with_eagle_draft, with_mtp_draft
from tests.with_vllm.nodes import ENVIRONMENT, NUM_NEW, Cluster, alone_with_steps

NUM_AT_ONCE = 16
NUM_STREAMS, NUM_STREAMED = 8, 200
# Six ranks on two busy cores can be silent for many seconds.
INTERVAL_MS = 20_000
FLAGS = ("--skip-tokenizer-init", "--max-num-batched-tokens", "128", "--max-num-seqs", "64")
EAGLE = json.dumps({"method": "eagle", "model": "MODEL/draft", "num_speculative_tokens": 3})
MTP = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
# Where vLLM cuts a prompt changes its rounding, which decides between drafts that are nearly equal.
UNCUT = ("--max-num-batched-tokens", "512")
NONE = "-"
GPU = "not run: needs a GPU"
SPARSE = "Sparse Attention is not supported on CPU."
BY_BATCH = "in bfloat16, vLLM's answers depend on the batch"
# The table's columns between the name of a shape and the version of vLLM.
Cells = tuple[str, str, str, str]
MLA = "on CPUs, vLLM's latent attention depends on the batch"


@dataclass(slots=True)
class Seen:
    """How the answers of nodes compare with those of vLLM in one process.

    Attributes:
        num_asked: Number of requests one by one; as many were sent at once.
        num_equal: How many of those one by one were equal.
        num_equal_at_once: How many of those at once were equal.
        num_repeated: At once, how many of them vLLM in one process answers as one by one.
        num_replayed: How many requests the router repeated.
        num_drafted: How many tokens came from drafts, in nodes and in one process.
        num_survived: How many of `NUM_STREAMS` answers were equal although a decode node was killed; None: not run.
    """

    num_asked: int
    num_equal: int
    num_equal_at_once: int
    num_repeated: int
    num_replayed: int
    num_drafted: tuple[int, int] = (0, 0)
    num_survived: int | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """A shape that nodes serve.

    Attributes:
        build: Writes the checkpoint into a directory.
        block_size: Tokens per block; None: vLLM's choice.
        flags: Flags of vLLM, in nodes and in one process. MODEL stands for the directory of the checkpoint.
        own_flags, node_flags: Further flags of nodes: Tandem's and vLLM's.
        differs: Why answers at once differ from those one by one in vLLM itself; empty: they do not.
        has_drafts: Whether a model drafts tokens.
        sizes: Tensor-parallel sizes of prefill and decode.
    """

    name: str
    build: Callable[[Path], Path]
    dtype: str = "float32"
    block_size: int | None = 32
    flags: Sequence[str] = ()
    own_flags: Sequence[str] = ()
    node_flags: Sequence[str] = ()
    differs: str = ""
    has_drafts: bool = False
    sizes: tuple[int, int] = (1, 1)

    def run(self, directory: Path, *, kills: bool = False) -> Seen:
        """Ask two nodes and vLLM in one process. `kills`: kill one of two decode nodes at the end."""
        model = self.build(directory / "model")
        asked = prompts(320, block=self.block_size or 128, longest=450, count=40)
        flags = [*FLAGS, *(word.replace("MODEL", str(model)) for word in self.flags)]
        flags += [] if self.block_size is None else ["--block-size", str(self.block_size)]
        own = ("--dtype", self.dtype)
        alone = partial(alone_with_steps, model, directory=directory, flags=[*own, *flags])
        firsts = range(0, 2 * len(asked), NUM_AT_ONCE)
        batches = [(asked * 2)[first : first + NUM_AT_ONCE] for first in firsts]
        short = [ids for ids in asked if len(ids) <= NUM_STREAMED]
        streamed = short[-NUM_STREAMS:] if kills else []
        longer = [(ids, {"max_tokens": NUM_STREAMED}) for ids in streamed]
        answers, _ = alone([*((each, {}) for each in (*asked * 2, *batches)), *longer])
        expected, answers = answers[: 2 * len(asked)], answers[2 * len(asked) :]
        repeated, streamed_alone = (
            itertools.chain(*answers[: len(batches)]),
            answers[len(batches) :],
        )
        more = {"flags": (*own, *self.own_flags), "vllm_flags": (*flags, *self.node_flags)}
        more |= {"sizes": self.sizes, "interval_ms": INTERVAL_MS, "decodes": 1 + kills}
        with Cluster(directory, model, **more) as cluster:
            drafted = self._drafted(cluster, asked, alone) if self.has_drafts else (0, 0)
            answered = [cluster.generate(ids) for ids in asked * 2]
            cluster.flush()
            at_once = cluster.generate_all(asked * 2, NUM_AT_ONCE)
            cluster.wait_free()
            assert all(node.load["pushed_bytes"] for node in cluster.prefills)
            assert all(node.load["received_bytes"] for node in cluster.decodes)
            num_replayed = cluster.num_replays()
            survived = _survive(cluster, streamed) if kills else []
        cold = expected[: len(asked)] * 2
        return Seen(
            num_asked=len(expected),
            num_equal=num_equal(answered, expected),
            num_equal_at_once=num_equal(at_once, cold),
            num_repeated=num_equal(repeated, cold),
            num_replayed=num_replayed,
            num_drafted=drafted,
            num_survived=num_equal(survived, streamed_alone) if kills else None,
        )

    def _drafted(self, cluster: Cluster, asked: list[list[int]], alone) -> tuple[int, int]:
        """Return how many tokens come from drafts, in nodes and in one process.

        Decode computes the second token without drafts. So does vLLM in one process if the prompt ends with the first.
        """
        # A draft's KV depends on the next token, also at the end of a cached block. Backwards, prompts share no blocks.
        backwards = [ids[::-1] for ids in asked]
        num_before = sum(node.num_steps() for node in cluster.decodes)
        begun = [[*ids, cluster.generate(ids)[0]] for ids in backwards]
        num_steps = sum(node.num_steps() for node in cluster.decodes) - num_before
        _, num_alone = alone([(ids, {"max_tokens": NUM_NEW - 1}) for ids in begun])
        num_tokens = len(begun) * (NUM_NEW - 1)
        return num_tokens - num_steps, num_tokens - num_alone

    def cells(self, directory: Path) -> Cells:
        seen = self.run(directory, kills=True)
        total = 2 * seen.num_asked
        equal = f"{seen.num_equal + seen.num_equal_at_once} of {total}"
        if self.differs:
            equal = (
                f"{seen.num_equal} of {seen.num_asked} one by one; at once {seen.num_equal_at_once}, "
                f"and one vLLM itself {seen.num_repeated}: {self.differs}"
            )
        drafted, drafted_alone = seen.num_drafted
        drafts = f"{drafted} apart, {drafted_alone} together" if self.has_drafts else NONE
        return "served", equal, f"{seen.num_survived} of {NUM_STREAMS}", drafts


def _survive(cluster: Cluster, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Stream all answers at once, and kill a decode node after the first token of each; return the answers."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        streams = [cluster.stream(ids, max_new_tokens=NUM_STREAMED) for ids in prompts]
        list(pool.map(next, streams))
        num_before = cluster.num_replays()
        max(cluster.decodes, key=lambda node: node.load["num_running"]).kill()
        answers = list(pool.map(lambda stream: list(stream)[-1], streams))
    assert cluster.num_replays() > num_before
    return answers


def num_equal(answers, expected) -> int:
    return sum(one == other for one, other in zip(answers, expected, strict=True))


@dataclass(frozen=True, slots=True)
class Refused:
    """A shape that a node refuses at start.

    Attributes:
        own_flags, node_flags: Tandem's and vLLM's flags that ask for it.
        kind: The tiny model.
        spec: vLLM's KV cache spec of it, if no tiny model has that.
    """

    name: str
    own_flags: Sequence[str] = ()
    node_flags: Sequence[str] = ()
    kind: str = "full attention"
    spec: str = ""

    def refusal(self, directory: Path) -> str:
        """Return the error of a node that is started so."""
        if self.spec:
            return self._refusal_of_spec()
        model = tiny(self.kind, directory / "model")
        [port] = free_ports(1)
        words = ["decode", "--engine", "vllm", "--model", str(model), "--port", str(port)]
        words += [*self.own_flags, "--", "--enforce-eager", *FLAGS, *self.node_flags]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tandem", *words],
            check=False,
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2, done.stderr[-3000:]
        [error] = re.findall(r"tandem decode: error: (.*)", done.stderr)
        return error

    def _refusal_of_spec(self) -> str:
        from vllm.v1 import kv_cache_interface as vllm

        from tandem.vllm.kv_config import groups_of

        spec = object.__new__(getattr(vllm, self.spec))  # only its type counts
        group = vllm.KVCacheGroupSpec(["layer"], spec)
        try:
            groups_of(vllm.KVCacheConfig(1, [], [group]))
        except ConfigInvalid as error:
            return str(error)
        raise AssertionError(f"{self.spec} is accepted")

    def cells(self, directory: Path) -> Cells:
        return f"refused: {self.refusal(directory)}", NONE, NONE, NONE


@dataclass(frozen=True, slots=True)
class Tested:
    """A shape that a test of its own covers. `seen`, `survived`: what the test compares, also after a SIGKILL."""

    name: str
    test: str
    seen: str
    survived: str = NONE

    def cells(self, _directory: Path) -> Cells:
        return "served", f"{self.seen} (`tests/with_vllm/{self.test}.py`)", self.survived, NONE


@dataclass(frozen=True, slots=True)
class NotRun:
    """A shape that this machine cannot run. `reason`: what is missing, in vLLM's words if it refuses the shape."""

    name: str
    reason: str = GPU

    def cells(self, _directory: Path) -> Cells:
        return self.reason, NONE, NONE, NONE


def shape(name: str, kind: str, *args, **more) -> Served:
    return Served(name, partial(tiny, kind), *args, **more)


BFLOAT16 = ("bfloat16", None)
FOUR = "with four KV heads"
CHUNKS = ("--push-granularity", "chunk", "--verify-kv", "off")
# The CPU build allocates the buffers between stages only when it compiles.
STAGES = ("--pipeline-parallel-size", "2", "--no-enforce-eager")
TIER = ("--kv-tier", "host:64MiB", "--kv-tier-min-tokens", "32", "--kv-tier-timeout-ms", "20000")
# vLLM's CPU build crashes without the extension: its kernels ignore which experts a rank has.
WIDE = ("--enable-expert-parallel",)
WIDE += ("--worker-extension-cls", "tests.with_vllm.experts_on_cpu.Extension")
BY_RANKS = "Experts divided over two ranks (the test adds what vLLM's CPU build lacks)"
RAY = ("--distributed-executor-backend", "ray")
EIGHT = f"{NUM_STREAMS} of {NUM_STREAMS}"
ALL_AT_ONCE = "40 of 40 one by one, and 19 at once"
SHAPES: Sequence[Served | Refused | Tested | NotRun] = (
    shape("Full attention (Llama)", "full attention"),
    shape("Experts (Qwen 3 MoE)", "experts"),
    shape("Sliding window (Mistral)", "sliding window"),
    shape("Windows in some layers (Gemma 3)", "windows in some layers"),
    shape("Windows and attention sinks (gpt-oss)", "windows and sinks"),
    shape("Chunked attention in some layers (Llama 4)", "chunks in some layers"),
    shape("Latent attention (DeepSeek V2)", "latent attention", block_size=16, differs=MLA),
    shape("Attention and Mamba states (Falcon-H1)", "state", block_size=None),
    shape("Delta-rule states (Qwen3-Next)", "state in some layers", *BFLOAT16, differs=BY_BATCH),
    shape("FP8 KV", "full attention", flags=("--kv-cache-dtype", "fp8")),
    shape("`--tp` 2 and 2", "experts", sizes=(2, 2)),
    shape("`--tp` 1 and 2", FOUR, sizes=(1, 2)),
    shape("`--tp` 2 and 1, by chunk, no checksums", FOUR, sizes=(2, 1), own_flags=CHUNKS),
    shape("`--tp` 2 and 4", FOUR, sizes=(2, 4)),
    shape("`--tp` 4 and 2", FOUR, sizes=(4, 2)),
    shape("`--tp` 2 and 1, windows in some layers", "windows in some layers", sizes=(2, 1)),
    shape("Two pipeline stages", "experts", node_flags=STAGES),
    shape(BY_RANKS, "experts", sizes=(2, 2), node_flags=WIDE),
    shape("KV tiers", "experts", own_flags=TIER),
    Tested(
        "Adapters, loaded and unloaded under load", "test_adapters", "every answer of an adapter"
    ),
    Tested(
        "Data parallelism, 2 and 2, with expert parallelism",
        "test_data_parallel",
        "40 of 40 one by one, and 16 at once; the test adds what vLLM's CPU build lacks",
        EIGHT,
    ),
    Tested("`--tp` 2 and 2, each node on two hosts", "test_hosts", ALL_AT_ONCE, EIGHT),
    Tested("Two pipeline stages, each on a host", "test_hosts", ALL_AT_ONCE),
    Served(
        "EAGLE draft (Llama)",
        with_eagle_draft,
        flags=("--speculative-config", EAGLE, *UNCUT),
        has_drafts=True,
    ),
    Served(
        "Multi-token prediction (GLM 4.5)",
        with_mtp_draft,
        flags=("--speculative-config", MTP, *UNCUT),
        has_drafts=True,
    ),
    NotRun("CUDA graphs, asynchronous scheduling"),
    NotRun("Sparse latent attention (DeepSeek V3.2)", f"{GPU}; vLLM: {SPARSE}"),
    Refused("Windows of latent attention (DeepSeek V4)", spec="SlidingWindowMLASpec"),
    Refused("Encoder-decoders", spec="CrossAttentionSpec"),
    Refused("Data parallelism in one node", node_flags=("--data-parallel-size", "2")),
    Refused("Several hosts per node, over Ray", own_flags=("--tp", "2"), node_flags=RAY),
    Refused(
        "Decode context parallelism",
        own_flags=("--tp", "2"),
        node_flags=("--decode-context-parallel-size", "2"),
        kind="latent attention",
    ),
    Refused("KV tiers with several ranks", own_flags=(*TIER, "--tp", "2")),
    Refused("KV tiers with windows in some layers", own_flags=TIER, kind="windows in some layers"),
)
