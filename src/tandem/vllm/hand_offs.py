"""The scheduler side of hand-offs: grants, pushes, and when blocks may be freed. Does no I/O and imports no vLLM.

```
 scheduler side: PrefillHandOffs, DecodeHandOffs ── WorkerOrders, each step ──▶ worker side of every rank (worker.py)
                                                 ◀── WorkerReports ───────────
```

vLLM calls a page a block. It frees the blocks of a request when the request finishes, unless the connector holds them; it
then frees them when the worker reports that no transfer uses them.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tandem.wire.errors import ErrorInfo
from tandem.wire.generation import Room, TokenLogprobs, address_of, room_of_transfer
from tandem.wire.prefixes import next_name, root_name

# The number of vLLM's null block, which no request owns.
NO_BLOCK = 0

# Block ids of one request, by group.
BlockIds = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one block table of vLLM.

    Attributes:
        block_size: Tokens per block.
        window: Sliding window in tokens, including the current one; 0: none. 2 for recurrent state, of which vLLM keeps
            only the block with the latest state.
        chunk: Size of an attention chunk in tokens; 0: none.
    """

    block_size: int
    window: int = 0
    chunk: int = 0

    @property
    def keeps_all(self) -> bool:
        """Whether vLLM keeps every block until the request ends."""
        return not (self.window or self.chunk)

    def num_skipped(self, num_tokens: int) -> int:
        """Return how many leading blocks are no longer needed after `num_tokens`, by vLLM's own formula."""
        skipped = max(0, num_tokens - self.window + 1) if self.window else 0
        skipped = num_tokens // self.chunk * self.chunk if self.chunk else skipped
        return skipped // self.block_size


class BlockPlace(NamedTuple):
    """A block of a prompt: the index of its first token, its group, and its index in the group's table."""

    token: int
    group: int
    number: int


def places(groups: Sequence[LayerGroup], num_tokens: int) -> list[BlockPlace]:
    """Return the blocks that decode needs to continue a prompt, in hand-off order."""
    return sorted(
        BlockPlace(index * group.block_size, number, index)
        for number, group in enumerate(groups)
        for index in range(group.num_skipped(num_tokens), -(-num_tokens // group.block_size))
    )


@dataclass(frozen=True, slots=True)
class BlockGrant:
    """Decode's blocks for a prompt, without the first `num_held`, and the prefill node that may write them.

    If decode has the whole prompt, `page_ids` and `request_id` are empty: the grant only ends prefill's wait.
    `prompt` is the expected prompt; see `prompt_name`.
    """

    request_id: str
    room: Room
    host: str
    port: int
    page_ids: Sequence[int]
    num_held: int
    prompt: int = 0


@dataclass(frozen=True, slots=True)
class Pages:
    """Computed blocks of prefill: those of `places` from index `first_page` on."""

    room: Room
    page_ids: Sequence[int]
    first_page: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What decode receives in addition to the blocks.

    Attributes:
        token: First token of the answer.
        num_cached: Prompt tokens that were in prefill's cache.
        prompt: Hash of the prompt; see `prompt_name`.
        logprobs: Log-probabilities of the token, if the request wants them.
    """

    token: int
    num_cached: int
    prompt: int = 0
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class WorkerOrders:
    """What the workers do during a step (`pushes`) and before it (everything else).

    Attributes:
        recalled: Prompts that vLLM has preempted; they are computed and pushed again.
        last_pushes: Remaining pages of finished prompts, computed in earlier steps.
        computed: Prompts whose last pages are in `last_pushes` or were pushed before, by request.
        cancelled: Requests whose hand-off is to be aborted.
    """

    expected: list[tuple[str, Room]] = field(default_factory=list)
    grants: list[BlockGrant] = field(default_factory=list)
    recalled: list[Room] = field(default_factory=list)
    pushes: list[Pages] = field(default_factory=list)
    last_pushes: list[Pages] = field(default_factory=list)
    computed: dict[str, tuple[Room, FirstToken]] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)


@dataclass(slots=True)
class WorkerReports:
    """Transfer events of the workers since the last step.

    Attributes:
        granted: Number of ranks that received decode's grant, by request.
        failed: Reason of each failed hand-off.
        handed_off: Number of ranks whose part is in decode's memory, by request.
        landed: Prompts that are in this node's memory, as reported by the first rank.
        moved_bytes: Bytes pushed or received by all ranks.
    """

    granted: Counter[str] = field(default_factory=Counter)
    failed: dict[str, ErrorInfo] = field(default_factory=dict)
    handed_off: Counter[str] = field(default_factory=Counter)
    landed: dict[str, FirstToken] = field(default_factory=dict)
    moved_bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.granted or self.failed or self.handed_off or self.landed)

    def add(self, other: "WorkerReports") -> None:
        """Add the reports of another rank."""
        self.granted += other.granted
        self.handed_off += other.handed_off
        self.failed = other.failed | self.failed
        self.landed = other.landed | self.landed
        self.moved_bytes += other.moved_bytes


@dataclass(slots=True)
class _Prompt:
    """A prompt at prefill that is handed off to decode.

    Attributes:
        places: The prompt's blocks.
        ends: End, in tokens, of each leading block that vLLM keeps until the request ends. These blocks are pushed as
            soon as they are computed, all others when the request ends.
        page_ids: Block ids by group.
        may_compute: Whether vLLM may compute it: its grant has come, or it needs none.
        is_sent: Whether the workers know the prompt.
    """

    room: Room
    num_tokens: int
    name: int
    places: list[BlockPlace]
    ends: list[int]
    page_ids: list[list[int]]
    may_compute: bool = False
    is_sent: bool = False
    is_over: bool = False
    num_pushed: int = 0
    num_cached: int | None = None


class PrefillHandOffs:
    """The hand-offs of a prefill node.

    Args:
        groups: The model's layer groups.
        num_ranks: Number of workers; each pushes its part of every page.
    """

    def __init__(self, groups: Sequence[LayerGroup], num_ranks: int = 1) -> None:
        self._groups, self._num_ranks = groups, num_ranks
        self._prompts: dict[str, _Prompt] = {}
        self._leaving: dict[str, Room] = {}  # computed, but not yet in decode's memory
        self._orders = WorkerOrders()
        self._handed_off: Counter[str] = Counter()
        self._granted: Counter[str] = Counter()

    def begin(
        self,
        request_id: str,
        room: Room,
        num_tokens: int,
        name: int = 0,
        *,
        waits_for_grant: bool = True,
    ) -> None:
        """Add a prompt.

        Args:
            name: See `prompt_name`.
            waits_for_grant: Compute it only once decode has blocks for it. Otherwise its blocks are held until the grant
                comes; if another prompt has the room, this one is computed without a hand-off.
        """
        if not waits_for_grant and room in self._rooms():
            return  # its blocks would be pushed in place of the other prompt's
        where = places(self._groups, num_tokens)
        ends: list[int] = []
        for place in where:
            group = self._groups[place.group]
            if not group.keeps_all:
                break
            ends.append(min(place.token + group.block_size, num_tokens))
        page_ids: list[list[int]] = [[] for _ in self._groups]
        self._prompts[request_id] = _Prompt(
            room, num_tokens, name, where, ends, page_ids, may_compute=not waits_for_grant
        )
        self._orders.expected.append((request_id, room))

    def _rooms(self) -> set[Room]:
        return {prompt.room for prompt in self._prompts.values()} | set(self._leaving.values())

    def may_compute(self, request_id: str) -> bool:
        """Whether the prompt has its grant or needs none, or its hand-off is over and it may run to its end."""
        prompt = self._prompts.get(request_id)
        return prompt is None or prompt.may_compute or prompt.is_over

    def on_scheduled(
        self, request_id: str, new_page_ids: BlockIds, num_before: int, num_new: int
    ) -> None:
        """Push the blocks that the next step of a request completes.

        Args:
            new_page_ids: Blocks added to the request since its last step.
            num_before: Tokens computed before the step; in the first step, the cached ones.
            num_new: Tokens that the step computes.
        """
        prompt = self._prompts.get(request_id)
        if prompt is None or prompt.is_over:
            return
        if prompt.num_cached is None:
            prompt.num_cached = num_before
        for held, new in zip(prompt.page_ids, new_page_ids, strict=True):
            held.extend(new)
        first = prompt.num_pushed
        prompt.num_pushed = bisect_right(prompt.ends, num_before + num_new)
        if prompt.num_pushed > first:
            done = prompt.places[first : prompt.num_pushed]
            pages = [prompt.page_ids[group][index] for _, group, index in done]
            self._orders.pushes.append(Pages(prompt.room, pages, first))

    def on_preempted(self, request_id: str) -> None:
        """Recall a prompt's pushes: vLLM reuses its blocks immediately, and will compute the prompt again."""
        prompt = self._prompts.get(request_id)
        if prompt is not None and not prompt.is_over:
            prompt.page_ids, prompt.num_pushed = [[] for _ in self._groups], 0
            self._orders.recalled.append(prompt.room)

    def on_finished(self, request_id: str, token_ids: Sequence[int], page_ids: BlockIds) -> bool:
        """Handle the end of a request. Return whether its blocks stay held until a worker reports them free.

        Args:
            token_ids: The prompt, and the first token after it unless the request was aborted before.
            page_ids: All blocks of the request.
        """
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return False
        if prompt.is_over:
            return prompt.is_sent
        left = prompt.places[prompt.num_pushed :]
        pages = [page_ids[group][index] for _, group, index in left if index < len(page_ids[group])]
        is_computed = len(token_ids) > prompt.num_tokens
        if not is_computed or len(pages) < len(left) or NO_BLOCK in pages:
            self._cancel(request_id, prompt)
            return prompt.is_sent
        if pages:
            self._orders.last_pushes.append(Pages(prompt.room, pages, prompt.num_pushed))
        first = FirstToken(token_ids[prompt.num_tokens], prompt.num_cached or 0, prompt.name)
        self._orders.computed[request_id] = prompt.room, first
        self._leaving[request_id] = prompt.room
        return prompt.is_sent

    def add_logprobs(self, request_id: str, logprobs: TokenLogprobs) -> None:
        """Add the log-probabilities of the first token. Call between `on_finished` and `take_orders`."""
        if (computed := self._orders.computed.get(request_id)) is not None:
            room, first = computed
            self._orders.computed[request_id] = room, replace(first, logprobs=logprobs)

    def on_reports(self, reports: WorkerReports) -> list[str]:
        """Process the workers' reports; return the prompts that are now completely in decode's memory."""
        self._granted += reports.granted
        self._handed_off += reports.handed_off
        for request_id in reports.failed:
            self._leaving.pop(request_id, None)
        for request_id in self._complete(self._granted):
            if prompt := self._prompts.get(request_id):
                prompt.may_compute = True
        for request_id in reports.failed:
            if prompt := self._prompts.get(request_id):
                prompt.is_over = True
        # Drop counts of requests that have ended: other ranks may still report them.
        self._keep_only(self._granted, self._prompts.keys() - reports.failed.keys())
        self._keep_only(self._handed_off, self._leaving.keys())
        handed_off = self._complete(self._handed_off)
        for request_id in handed_off:
            del self._leaving[request_id]
        return handed_off

    def take_orders(self) -> WorkerOrders:
        """Return the orders for the next step."""
        orders, self._orders = self._orders, WorkerOrders()
        for request_id, _ in orders.expected:
            if prompt := self._prompts.get(request_id):
                prompt.is_sent = True
        return orders

    def _cancel(self, request_id: str, prompt: _Prompt) -> None:
        prompt.is_over = True
        if prompt.is_sent:
            self._orders.cancelled.append(request_id)
        else:
            self._orders.expected.remove((request_id, prompt.room))

    @staticmethod
    def _keep_only(counts: Counter[str], request_ids: Set[str]) -> None:
        for request_id in counts.keys() - request_ids:
            del counts[request_id]

    def _complete(self, counts: Counter[str]) -> list[str]:
        complete = [each for each, count in counts.items() if count >= self._num_ranks]
        for request_id in complete:
            del counts[request_id]
        return complete


@dataclass(frozen=True, slots=True)
class PromptSource:
    """The prefill node and room that a prompt comes from. `prompt`: see `prompt_name`."""

    room: Room
    host: str
    port: int
    prompt: int = 0


class DecodeHandOffs:
    """The hand-offs of a decode node. `groups`: the model's layer groups."""

    def __init__(self, groups: Sequence[LayerGroup]) -> None:
        self._groups = groups
        self._granted: set[str] = set()  # never granted again, not even after a failure
        self._loading: set[str] = set()  # granted, but not landed
        self._orders = WorkerOrders()

    def num_external(self, request_id: str, source: PromptSource | None, num_missing: int) -> int:
        """Return how many of the `num_missing` tokens that are not cached here come from prefill."""
        return 0 if source is None or request_id in self._granted else num_missing

    def on_allocated(
        self,
        request_id: str,
        source: PromptSource,
        page_ids: BlockIds,
        num_tokens: int,
        num_external: int,
    ) -> bool:
        """Grant a request's blocks, except the leading ones that are cached here. Return False if already granted.

        Args:
            num_tokens: Prompt tokens that can come from prefill.
            num_external: How many of them do come from prefill; they are the last ones.
        """
        if request_id in self._granted:
            return False
        self._granted.add(request_id)
        num_cached, pages, num_held = num_tokens - num_external, list[int](), 0
        if num_external:
            for token, group, index in places(self._groups, num_tokens):
                if token < num_cached:
                    num_held += 1
                else:
                    pages.append(page_ids[group][index])
        if NO_BLOCK in pages:
            raise AssertionError(f"vLLM allocated no block for a token from prefill: {page_ids}")
        if num_external:
            self._loading.add(request_id)
        receiver = request_id if num_external else ""
        self._orders.grants.append(
            BlockGrant(
                receiver, source.room, source.host, source.port, pages, num_held, source.prompt
            )
        )
        return True

    def on_reports(self, reports: WorkerReports) -> dict[str, FirstToken]:
        """Process the workers' reports; return each landed prompt once, though ranks report it in different steps."""
        new = {each: first for each, first in reports.landed.items() if each in self._loading}
        self._loading -= new.keys()
        return new

    def on_finished(self, request_id: str) -> None:
        """Handle the end of a request. vLLM itself holds the blocks until the transfer has ended."""
        self._loading.discard(request_id)
        if request_id in self._granted:
            self._granted.remove(request_id)
            self._orders.cancelled.append(request_id)

    def take_orders(self) -> WorkerOrders:
        """Return the orders for the next step."""
        orders, self._orders = self._orders, WorkerOrders()
        return orders


def source_of(params: Mapping[str, object] | None) -> PromptSource | None:
    """Read the source of a prompt from `kv_transfer_params`; None: it is computed here."""
    match params:
        case {
            "bootstrap_room": int(room),
            "bootstrap_host": str(host),
            "bootstrap_port": int(port),
        }:
            return PromptSource(Room(room), host, port)
        case {"transfer_id": str(name), "do_remote_prefill": True}:
            address = address_of(params or {})
            return PromptSource(room_of_transfer(name), *address) if address else None
        case _:
            return None


def room_of(params: Mapping[str, object] | None) -> Room | None:
    """Read the room of a request from `kv_transfer_params`; None: it is not handed off."""
    match params:
        case {"bootstrap_room": int(room)}:
            return Room(room)
        case {"transfer_id": str(name)}:
            return room_of_transfer(name)
        case _:
            return None


def waits_for_grant(params: Mapping[str, object] | None) -> bool:
    """Whether prefill waits for decode's blocks.

    Proxies for MooncakeConnector may start decode after prefill's answer; ours starts both at once.
    """
    return params is None or params.get("waits_for_grant", "transfer_id" not in params) is True


def prompt_name(token_ids: Sequence[int], kind: str = "") -> int:
    """Return a hash of a prompt. Both ends compare it, so that decode rejects the KV of a different prompt.

    Args:
        kind: Other inputs of the KV, such as the adapter.
    """
    return next_name(root_name(kind), token_ids)


def draws_first(params: Mapping[str, object] | None) -> bool:
    """Whether prefill samples the first token of the answer, as between nodes.

    Otherwise decode computes the last prompt token again and samples the first token itself: outside of nodes, vLLM's
    front end knows only the tokens that its own engine has sampled.
    """
    return params is not None and params.get("draws_first") is True
