"""What vLLM's scheduler decides of hand-offs, without vLLM: grants, pushes, and when blocks may be freed. Pure.

```
 scheduler side: PrefillHalves, DecodeHalves ── Orders, each step ──▶ worker side of every rank (worker.py)
                                             ◀── Reports ───────────
```

vLLM calls a page a block. It frees the blocks of a request when the request finishes, unless the connector holds them; then
the worker names the request once no transfer uses its blocks.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.wire.errors import ErrorInfo
from tandem.wire.generation import Room
from tandem.wire.prefixes import next_name, root_name

# vLLM's number of a block that no request may use.
NO_BLOCK = 0

# The blocks of one request, group by group.
BlockIds = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Group:
    """Layers whose blocks vLLM keeps in one table.

    Attributes:
        block_size: Tokens of a block.
        window: The next token attends to so many, itself included; 0: to all. A recurrent state has 2: the last token's
            is kept.
        chunk: Tokens attend to those of their chunk of so many; 0: to all.
    """

    block_size: int
    window: int = 0
    chunk: int = 0

    @property
    def keeps_all(self) -> bool:
        """Whether every block is kept as long as the request runs."""
        return not (self.window or self.chunk)

    def num_skipped(self, num_tokens: int) -> int:
        """Return how many blocks at the begin nobody needs once `num_tokens` are computed, as vLLM counts them."""
        skipped = max(0, num_tokens - self.window + 1) if self.window else 0
        skipped = num_tokens // self.chunk * self.chunk if self.chunk else skipped
        return skipped // self.block_size


class Place(NamedTuple):
    """A block of a prompt: its first token, its group, and its number in the group's table."""

    token: int
    group: int
    number: int


def places(groups: Sequence[Group], num_tokens: int) -> list[Place]:
    """Return the blocks that a prompt needs to be gone on with, in the order in which they are handed off."""
    return sorted(
        Place(index * group.block_size, number, index)
        for number, group in enumerate(groups)
        for index in range(group.num_skipped(num_tokens), -(-num_tokens // group.block_size))
    )


@dataclass(frozen=True, slots=True)
class Grant:
    """Decode's blocks for a prompt but its first `num_held`, and the prefill that may write them.

    `request_id` is empty if there are none, and no request waits for them: prefill need not wait then either. `prompt` is the
    name of the prompt that has to land.
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
    """Prefill's blocks that are complete: those of `places` from `first_page` on."""

    room: Room
    page_ids: Sequence[int]
    first_page: int


@dataclass(frozen=True, slots=True)
class First:
    """What decode receives beside the blocks.

    Attributes:
        token: The first of the answer.
        num_cached: Prompt tokens that prefill had cached.
        prompt: The prompt's name: see `prompt_name`.
    """

    token: int
    num_cached: int
    prompt: int = 0


@dataclass(slots=True)
class Orders:
    """What the workers do before a step (all but `pushes`) and in it.

    Attributes:
        last_pushes: Of blocks that were computed in the steps before.
        computed: Prompts whose blocks were all pushed with that.
    """

    expected: list[tuple[str, Room]] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    pushes: list[Pages] = field(default_factory=list)
    last_pushes: list[Pages] = field(default_factory=list)
    computed: list[tuple[Room, First]] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Reports:
    """What the workers heard since the last step.

    Attributes:
        granted: Prompts whose pages decode granted, by the number of ranks that heard so.
        failed: Hand-offs that failed, and why.
        handed_off: Prompts that are in decode's memory, by the number of ranks.
        landed: Prompts that are in our memory, as the first rank heard.
        moved_bytes: Pushed or received by all ranks.
    """

    granted: Counter[str] = field(default_factory=Counter)
    failed: dict[str, ErrorInfo] = field(default_factory=dict)
    handed_off: Counter[str] = field(default_factory=Counter)
    landed: dict[str, First] = field(default_factory=dict)
    moved_bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.granted or self.failed or self.handed_off or self.landed)

    def add(self, other: "Reports") -> None:
        """Add the reports of another rank."""
        self.granted += other.granted
        self.handed_off += other.handed_off
        self.failed = other.failed | self.failed
        self.landed = other.landed | self.landed
        self.moved_bytes += other.moved_bytes


@dataclass(slots=True)
class _Prompt:
    """A prompt at prefill that goes to decode.

    Attributes:
        places: Its blocks.
        ends: Where each of the first ones ends that vLLM keeps until the request ends: these are pushed as they come.
        page_ids: By group.
    """

    room: Room
    num_tokens: int
    name: int
    places: list[Place]
    ends: list[int]
    page_ids: list[list[int]]
    is_granted: bool = False
    is_told: bool = False
    is_over: bool = False
    num_pushed: int = 0
    num_cached: int | None = None


class PrefillHalves:
    """The prompts of a prefill node.

    Args:
        groups: How vLLM keeps the blocks.
        num_ranks: Workers that each push a part of every page.
    """

    def __init__(self, groups: Sequence[Group], num_ranks: int = 1) -> None:
        self._groups, self._num_ranks = groups, num_ranks
        self._prompts: dict[str, _Prompt] = {}
        self._leaving: set[str] = set()  # computed, and not in decode's memory yet
        self._orders = Orders()
        self._handed_off: Counter[str] = Counter()
        self._granted: Counter[str] = Counter()

    def begin(self, request_id: str, room: Room, num_tokens: int, name: int = 0) -> None:
        """Take a prompt: its grant is awaited. `name`: see `prompt_name`."""
        where = places(self._groups, num_tokens)
        ends: list[int] = []
        for place in where:
            group = self._groups[place.group]
            if not group.keeps_all:
                break
            ends.append(min(place.token + group.block_size, num_tokens))
        page_ids: list[list[int]] = [[] for _ in self._groups]
        self._prompts[request_id] = _Prompt(room, num_tokens, name, where, ends, page_ids)
        self._orders.expected.append((request_id, room))

    def may_compute(self, request_id: str) -> bool:
        """Tell whether decode has room for the prompt, or never will, so that the request can end."""
        prompt = self._prompts.get(request_id)
        return prompt is None or prompt.is_granted or prompt.is_over

    def computes(
        self, request_id: str, new_page_ids: BlockIds, num_before: int, num_new: int
    ) -> None:
        """Note what the next step computes of a request.

        Args:
            new_page_ids: Blocks that came to those of the request since it was last computed.
            num_before: Tokens computed before the step; at first those that were cached.
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

    def preempted(self, request_id: str) -> bool:
        """Give a hand-off up, if there is one: vLLM gives the request's blocks to others at once."""
        prompt = self._prompts.get(request_id)
        if prompt is None or prompt.is_over:
            return False
        self._give_up(request_id, prompt)
        return True

    def finished(self, request_id: str, first_token: int | None, page_ids: BlockIds) -> bool:
        """Take note of a request's end; tell whether its blocks are held until a worker names it.

        Args:
            first_token: Of the answer; None if the request was aborted before it had one.
            page_ids: All blocks that it has.
        """
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return False
        if prompt.is_over:
            return prompt.is_told
        left = prompt.places[prompt.num_pushed :]
        pages = [page_ids[group][index] for _, group, index in left if index < len(page_ids[group])]
        if first_token is None or len(pages) < len(left) or NO_BLOCK in pages:
            self._give_up(request_id, prompt)
            return prompt.is_told
        if pages:
            self._orders.last_pushes.append(Pages(prompt.room, pages, prompt.num_pushed))
        first = First(first_token, prompt.num_cached or 0, prompt.name)
        self._orders.computed.append((prompt.room, first))
        self._leaving.add(request_id)
        return prompt.is_told

    def heard(self, reports: Reports) -> list[str]:
        """Take the reports of the workers; return the prompts that decode has now."""
        self._granted += reports.granted
        self._handed_off += reports.handed_off
        self._leaving -= reports.failed.keys()
        for request_id in self._complete(self._granted):
            if prompt := self._prompts.get(request_id):
                prompt.is_granted = True
        for request_id in reports.failed:
            if prompt := self._prompts.get(request_id):
                prompt.is_over = True
        # What some ranks report of a request that is over elsewhere is not kept.
        self._keep_only(self._granted, self._prompts.keys() - reports.failed.keys())
        self._keep_only(self._handed_off, self._leaving)
        handed_off = self._complete(self._handed_off)
        self._leaving -= set(handed_off)
        return handed_off

    def take_orders(self) -> Orders:
        """Return what the workers do next."""
        orders, self._orders = self._orders, Orders()
        for request_id, _ in orders.expected:
            if prompt := self._prompts.get(request_id):
                prompt.is_told = True
        return orders

    def _give_up(self, request_id: str, prompt: _Prompt) -> None:
        prompt.is_over = True
        if prompt.is_told:
            self._orders.given_up.append(request_id)
        else:
            self._orders.expected.remove((request_id, prompt.room))

    @staticmethod
    def _keep_only(counts: Counter[str], wanted: Set[str]) -> None:
        for request_id in counts.keys() - wanted:
            del counts[request_id]

    def _complete(self, counts: Counter[str]) -> list[str]:
        complete = [each for each, count in counts.items() if count >= self._num_ranks]
        for request_id in complete:
            del counts[request_id]
        return complete


@dataclass(frozen=True, slots=True)
class Source:
    """Where a decode node's prompt comes from. `prompt`: its name; see `prompt_name`."""

    room: Room
    host: str
    port: int
    prompt: int = 0


class DecodeHalves:
    """The prompts that a decode node awaits. `groups`: how vLLM keeps the blocks."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._awaited: set[str] = set()  # asked for once; a failed one is not asked for again
        self._loading: set[str] = set()  # of these, those that did not land yet
        self._orders = Orders()

    def num_external(self, request_id: str, source: Source | None, num_missing: int) -> int:
        """Return how many tokens of a prompt come from prefill, if `num_missing` are not cached here."""
        return 0 if source is None or request_id in self._awaited else num_missing

    def allocated(
        self,
        request_id: str,
        source: Source,
        page_ids: BlockIds,
        num_tokens: int,
        num_external: int,
    ) -> bool:
        """Grant a request's blocks, of which the first hold the tokens that are cached here; return False if they were.

        Args:
            num_tokens: Of the prompt, as many as may come from prefill.
            num_external: Of these, how many do: the last ones.
        """
        if request_id in self._awaited:
            return False
        self._awaited.add(request_id)
        num_cached, pages, num_held = num_tokens - num_external, list[int](), 0
        if num_external:
            for token, group, index in places(self._groups, num_tokens):
                if token < num_cached:
                    num_held += 1
                else:
                    pages.append(page_ids[group][index])
        if NO_BLOCK in pages:
            raise AssertionError(f"vLLM gave no block where one is needed: {page_ids}")
        if num_external:
            self._loading.add(request_id)
        asked = request_id if num_external else ""
        self._orders.grants.append(
            Grant(*(asked, source.room, source.host, source.port, pages, num_held, source.prompt))
        )
        return True

    def heard(self, reports: Reports) -> dict[str, First]:
        """Take the reports of the workers; return what landed and was not returned before: ranks report in steps of their own."""
        new = {each: first for each, first in reports.landed.items() if each in self._loading}
        self._loading -= new.keys()
        return new

    def finished(self, request_id: str) -> None:
        """Take note of a request's end. vLLM holds the blocks itself while a transfer is awaited."""
        self._loading.discard(request_id)
        if request_id in self._awaited:
            self._awaited.remove(request_id)
            self._orders.given_up.append(request_id)

    def take_orders(self) -> Orders:
        """Return what the workers do next."""
        orders, self._orders = self._orders, Orders()
        return orders


def source_of(params: Mapping[str, object] | None) -> Source | None:
    """Return where a request's prompt comes from, by its `kv_transfer_params`; None if it is computed here."""
    match params:
        case {
            "bootstrap_room": int(room),
            "bootstrap_host": str(host),
            "bootstrap_port": int(port),
        }:
            return Source(Room(room), host, port)
        case _:
            return None


def room_of(params: Mapping[str, object] | None) -> Room | None:
    """Return the room that a prompt goes to, by the request's `kv_transfer_params`; None if it stays."""
    match params:
        case {"bootstrap_room": int(room)}:
            return Room(room)
        case _:
            return None


def prompt_name(token_ids: Sequence[int], kind: str = "") -> int:
    """Return what a prompt is called at both ends, so that no other one lands in its place.

    Args:
        kind: What else the KV follows from.
    """
    return next_name(root_name(kind), token_ids)


def draws_first(params: Mapping[str, object] | None) -> bool:
    """Tell whether prefill draws the answer's first token, which then ends decode's prompt.

    Otherwise decode computes the prompt's last token again, and draws the first token itself.
    """
    return params is not None and params.get("draws_first") is True
