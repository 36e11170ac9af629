"""A cluster in virtual time, for `benchmarks/policies.py`: events in a heap, nothing sleeps.

```
 arrival ──router.policy.choose──▶ prefill: a queue, first come first served ──▶ first token
                                     └─▶ decode: one batch, a step as long as the profile says ──▶ end
 each node, every 0.2 s: load ──▶ snapshot      every 0.5 s: what its journal has ──▶ CachedPrefixes
```

The choice, the snapshots, the journals and the sets of names are the product's own. What a node does with a
request is a model: the time of `tandem.engine.profile`, an LRU cache of whole blocks. The transfer of KV takes no
time, and a decode never runs out of pages.
"""

import heapq
import itertools
import random
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from typing_extensions import override

from benchmarks.mooncake import BLOCK_TOKENS, TraceRequest
from tandem.engine.profile import Profile
from tandem.router.policy import Asked, ClusterSnapshot, NodeSnapshot, Policy, choose
from tandem.router.prefixes import KnownPrefixes, PromptBlocks
from tandem.wire.ids import Epoch
from tandem.wire.messages import CacheReport, NodeLoad
from tandem.wire.prefix_blocks import pack_names
from tandem.wire.prefix_journal import PrefixJournal

# As nodes do: `node/loop.py` tells the load, `frontend/engine_client.py` asks for the cache.
LOAD_INTERVAL_S = 0.2
CACHE_INTERVAL_S = 0.5
FINGERPRINT = "model"
PAGE_SIZE = 16


class TracePrompt(PromptBlocks):
    """A prompt whose blocks the trace has numbered."""

    block_tokens = BLOCK_TOKENS

    def __init__(self, blocks: Sequence[int]) -> None:
        super().__init__(())
        self._blocks = blocks

    @override
    def names(self) -> Sequence[int]:
        """See `PromptBlocks`."""
        return self._blocks


class BlockCache:
    """Blocks of one node, the least recently used forgotten first, a prompt from its end."""

    def __init__(self, max_tokens: int) -> None:
        self.journal = PrefixJournal()
        self._max_blocks = max_tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def num_cached(self, blocks: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks are here."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            count += 1
        return count

    def put(self, blocks: Sequence[int]) -> None:
        """Keep a prompt as the most recently used one."""
        for block in reversed(blocks):
            if block not in self._blocks:
                self.journal.add(block)
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self.journal.remove(self._blocks.popitem(last=False)[0])


@dataclass(slots=True)
class Job:
    """One request on its way.

    Attributes:
        num_cached: Prompt tokens that its prefill had.
        num_moved: Prompt tokens that its decode did not have.
        first_token_s: When it came, from the arrival on.
        until_step: The decode's step that gives its last token.
    """

    request: TraceRequest
    decode: "DecodeModel"
    is_counted: bool
    num_cached: int = 0
    num_moved: int = 0
    first_token_s: float = 0.0
    until_step: float = 0.0


class NodeModel:
    """What prefill and decode have in common: a cache, and what the router knows of them."""

    role = ""

    def __init__(
        self, index: int, zone: str, cache_tokens: int, profile: Profile, known: KnownPrefixes
    ) -> None:
        self.cache = BlockCache(cache_tokens)
        self.busy_s = 0.0
        self._profile = profile
        self._prefixes = known.new_life()
        self._url, self._zone = f"http://{self.role}-{index}:7000", zone
        self._load, self._fresh_tokens = self.load(), 0
        self.snapshot = self._snapshot()

    def load(self) -> NodeLoad:
        """Return what the node would say now."""
        raise NotImplementedError

    def chosen(self, num_tokens: int) -> None:
        """The router sent a request here, which is so many tokens to do."""
        self._fresh_tokens += num_tokens
        self.snapshot = self._snapshot()

    def tell_load(self) -> None:
        """The load arrives at the router."""
        load = self.load()
        self._prefixes.heard(load)
        if load != self._load or self._fresh_tokens:
            self._load, self._fresh_tokens = load, 0
            self.snapshot = self._snapshot()

    def tell_cache(self) -> None:
        """What changed in the cache arrives at the router."""
        self._tell("", self.cache.journal, self._prefixes.position)

    def _tell(self, tier: str, journal: PrefixJournal, position: int) -> None:
        changes = journal.since(position)
        if changes is not None:
            self._prefixes.take(
                CacheReport(
                    epoch=Epoch(1),
                    tier=tier,
                    position=changes.position,
                    is_whole=changes.is_whole,
                    added=pack_names(changes.added),
                    removed=pack_names(changes.removed),
                )
            )

    def _snapshot(self) -> NodeSnapshot:
        return NodeSnapshot(
            url=self._url,
            role=self.role,
            is_up=True,
            fingerprint=FINGERPRINT,
            load=self._load,
            fresh_tokens=self._fresh_tokens,
            zone=self._zone,
            prefixes=self._prefixes.cached,
            tiers=self._prefixes.tiers,
        )


class PrefillModel(NodeModel):
    """Computes one prompt after the other."""

    role = "prefill"

    def __init__(self, *args: object) -> None:
        self.queue: deque[Job] = deque()
        super().__init__(*args)  # type: ignore[arg-type]

    @override
    def load(self) -> NodeLoad:
        """See `NodeModel`. As the engine does, it counts what waits in full."""
        queued = sum(job.request.num_prompt for job in self.queue)
        return NodeLoad(num_running=min(1, len(self.queue)), queued_tokens=queued)

    def fetch(self, job: Job) -> float:
        """Take from elsewhere what is not cached; return how long it takes until the job may be in line."""
        del job
        return 0.0

    def line_up(self, job: Job) -> None:
        """Put a job at the end of the line."""
        self.queue.append(job)

    def begin(self) -> float:
        """Begin with the first in line; return how long it takes."""
        job = self.queue[0]
        blocks = job.request.blocks
        # Of a prompt that is cached whole, the last token is computed.
        most = job.request.num_prompt - 1
        job.num_cached = min(most, self.cache.num_cached(blocks) * BLOCK_TOKENS)
        num_new = job.request.num_prompt - job.num_cached
        took_s = self._profile.prefill.forward_s(num_new, job.num_cached)
        self.busy_s += took_s
        return took_s

    def end(self) -> Job:
        """Take the one that is done out of the line."""
        job = self.queue.popleft()
        self.cache.put(job.request.blocks)
        return job


class DecodeModel(NodeModel):
    """Gives each of its requests a token a step; a step is as long as they are many and long."""

    role = "decode"

    def __init__(self, *args: object) -> None:
        self.version = 0
        self._steps, self._at_s, self._held = 0.0, 0.0, 0
        self._running: list[tuple[float, int, Job]] = []
        self._numbers = itertools.count()
        super().__init__(*args)  # type: ignore[arg-type]

    @override
    def load(self) -> NodeLoad:
        """See `NodeModel`."""
        pages = self._held // PAGE_SIZE
        return NodeLoad(num_running=len(self._running), pages_held=pages, page_size=PAGE_SIZE)

    def join(self, job: Job, now_s: float) -> None:
        """Take over a prompt that landed."""
        self._advance(now_s)
        blocks = job.request.blocks
        cached = self.cache.num_cached(blocks) * BLOCK_TOKENS
        job.num_moved = job.request.num_prompt - cached
        self.cache.put(blocks)
        job.until_step = self._steps + job.request.num_output - 1
        self._held += job.request.num_prompt + job.request.num_output
        heapq.heappush(self._running, (job.until_step, next(self._numbers), job))

    def next_end_s(self, now_s: float) -> float | None:
        """Return when the next request ends if nothing changes before."""
        self._advance(now_s)
        if not self._running:
            return None
        return now_s + max(0.0, self._running[0][0] - self._steps) * self._step_s()

    def end(self, now_s: float) -> Job:
        """Take out the request that ends now."""
        self._advance(now_s)
        _, _, job = heapq.heappop(self._running)
        self._held -= job.request.num_prompt + job.request.num_output
        return job

    def _step_s(self) -> float:
        return self._profile.decode.forward_s(len(self._running), self._held)

    def _advance(self, now_s: float) -> None:
        if self._running:
            self._steps += (now_s - self._at_s) / self._step_s()
            self.busy_s += now_s - self._at_s
        self._at_s = now_s


@dataclass(slots=True)
class Outcome:
    """What came of a run, of the requests that count.

    Attributes:
        busy_s: Of each prefill.
        choice_s: Of each choice of a pair, by the clock of this thread: others may use the machine.
        decode_s: From the first token to the last, divided by the tokens between.
    """

    first_token_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    choice_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_cached: int = 0
    num_moved: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that prefill had cached."""
        return self.num_cached / self.num_prompt

    @property
    def imbalance(self) -> float:
        """Computing time of the busiest prefill, by the average."""
        return max(self.busy_s) / statistics.mean(self.busy_s)


class ClusterModel:
    """Runs a trace under one policy.

    Args:
        warm_s: Requests that arrive before it fill the caches and are not counted.
    """

    def __init__(
        self,
        policy: Policy,
        prefills: list[PrefillModel],
        decodes: list[DecodeModel],
        *,
        warm_s: float,
        seed: int = 0,
    ) -> None:
        self._policy, self._rng = policy, random.Random(seed)
        self._prefills = {node.snapshot.url: node for node in prefills}
        self._decodes = {node.snapshot.url: node for node in decodes}
        self._warm_s, self._turn = warm_s, 0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self.outcome = Outcome()

    def run(self, requests: Sequence[TraceRequest]) -> Outcome:
        """Serve all requests to their end."""
        nodes = [*self._prefills.values(), *self._decodes.values()]
        for node in nodes:
            self._every(LOAD_INTERVAL_S, node.tell_load, requests[-1].at_s)
            self._every(CACHE_INTERVAL_S, node.tell_cache, requests[-1].at_s)
        for request in requests:
            self._at(request.at_s, partial(self._arrive, request))
        while self._events:
            now_s, _, act = heapq.heappop(self._events)
            act(now_s)
        self.outcome.busy_s = [node.busy_s for node in self._prefills.values()]
        return self.outcome

    def _at(self, at_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), act))

    def _every(self, interval_s: float, tell: Callable[[], None], until_s: float) -> None:
        """Call `tell` at intervals, beginning anywhere within the first."""

        def again(now_s: float) -> None:
            tell()
            if now_s < until_s:
                self._at(now_s + interval_s, again)

        self._at(self._rng.uniform(0, interval_s), again)

    def _arrive(self, request: TraceRequest, now_s: float) -> None:
        snapshot = ClusterSnapshot(
            tuple(node.snapshot for node in self._prefills.values()),
            tuple(node.snapshot for node in self._decodes.values()),
        )
        asked = Asked(request.num_prompt, f"s{request.session}", TracePrompt(request.blocks))
        began = time.thread_time()
        pair = choose(snapshot, FINGERPRINT, self._policy, self._turn, self._rng, asked=asked)
        self.outcome.choice_s.append(time.thread_time() - began)
        self._turn += 1
        prefill, decode = self._prefills[pair.prefill], self._decodes[pair.decode]
        prefill.chosen(request.num_prompt - round(asked.saved_tokens(prefill.snapshot)))
        decode.chosen(request.num_prompt)
        job = Job(request, decode, is_counted=now_s >= self._warm_s)
        if fetch_s := prefill.fetch(job):
            self._at(now_s + fetch_s, lambda there_s: self._line_up(prefill, job, there_s))
        else:
            self._line_up(prefill, job, now_s)

    def _line_up(self, prefill: PrefillModel, job: Job, now_s: float) -> None:
        prefill.line_up(job)
        if len(prefill.queue) == 1:
            self._compute(prefill, now_s)

    def _compute(self, prefill: PrefillModel, now_s: float) -> None:
        self._at(now_s + prefill.begin(), lambda done_s: self._computed(prefill, done_s))

    def _computed(self, prefill: PrefillModel, now_s: float) -> None:
        job = prefill.end()
        job.first_token_s = now_s - job.request.at_s
        if prefill.queue:
            self._compute(prefill, now_s)
        job.decode.join(job, now_s)
        self._expect_end(job.decode, now_s)
        if job.is_counted:
            out = self.outcome
            out.first_token_s.append(job.first_token_s)
            out.num_prompt += job.request.num_prompt
            out.num_cached += job.num_cached
            out.num_moved += job.num_moved

    def _expect_end(self, decode: DecodeModel, now_s: float) -> None:
        decode.version += 1
        version, end_s = decode.version, decode.next_end_s(now_s)
        if end_s is not None:
            self._at(end_s, lambda now_s: self._ended(decode, version, now_s))

    def _ended(self, decode: DecodeModel, version: int, now_s: float) -> None:
        if version != decode.version:
            return  # somebody joined since: steps are longer
        job = decode.end(now_s)
        if job.is_counted and job.request.num_output > 1:
            took_s = now_s - job.request.at_s - job.first_token_s
            self.outcome.decode_s.append(took_s / (job.request.num_output - 1))
        self._expect_end(decode, now_s)
