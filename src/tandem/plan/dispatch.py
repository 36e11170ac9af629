"""The router in virtual time: the product's line, places and policy over what nodes told of themselves.

```
 arrival ──▶ line ──Places.count──▶ choose ──▶ halves start at both nodes ──▶ end: a place is free
 each node, every 0.2 s: load ──▶ snapshot      every 0.5 s: what its journal has ──▶ CachedPrefixes
```

One edge worker with nothing else to do; what it takes of a request's time is in `Overheads`.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial

from tandem.node.loop import PROBE_INTERVAL_S
from tandem.plan.agenda import Agenda
from tandem.plan.nodes import FINGERPRINT, Journey, PlannedNode, Report
from tandem.plan.prompts import Prompts
from tandem.plan.seam import Fleet
from tandem.router.admission import COUNT_S_PER_NODE, Queue, Waiting
from tandem.router.config import Limits
from tandem.router.places import Places
from tandem.router.policies import POLICIES
from tandem.router.policy import (
    Asked,
    ClusterSnapshot,
    NodeSnapshot,
    Pair,
    choose,
    stays_on_decode,
    tokens_to_compute,
)
from tandem.router.prefixes import PrefixIndex, PromptBlocks
from tandem.wire.errors import TandemError
from tandem.wire.generation import GenerateRequest
from tandem.wire.heartbeat import DEFAULT_HEARTBEAT
from tandem.wire.ids import Epoch, Room
from tandem.wire.messages import CacheReport, NodeLoad, StartColocated, StartDecode, StartPrefill
from tandem.wire.prefix_blocks import pack_names

# A load that shows room is looked at this soon.
LOOK_S = 0.01


class KnownNode:
    """One node as the router knows it.

    Args:
        changed: Holds those whose snapshot is out of date.

    Attributes:
        own_tokens: Prompt tokens that were given to it to compute beside its answers.
    """

    def __init__(
        self,
        node: PlannedNode,
        role: str,
        index: int,
        *,
        zone: str,
        prefixes: PrefixIndex,
        changed: "set[KnownNode]",
    ) -> None:
        self.node, self.role, self.index = node, role, index
        self.url = f"http://{role}-{index}:7000"
        self.in_flight_requests = self.in_flight_tokens = self.own_tokens = 0
        self._fresh_tokens = 0
        self._zone, self._prefixes = zone, prefixes.new_life()
        self._load, self._changed = NodeLoad(), changed
        changed.add(self)

    def count(self, num_requests: int, num_tokens: int) -> None:
        """Count what was started here, or with negative numbers what ended."""
        self.in_flight_requests += num_requests
        self.in_flight_tokens += num_tokens
        self._changed.add(self)

    def expect(self, num_tokens: int) -> None:
        """It was given so much to do, which its load does not tell of yet."""
        self._fresh_tokens += num_tokens
        self._changed.add(self)

    def own(self, num_tokens: int) -> None:
        """Count prompt tokens that it computes beside its answers, or with a minus, has computed."""
        self.own_tokens += num_tokens
        self._changed.add(self)

    def told(self, load: NodeLoad) -> None:
        """Its load arrives."""
        if load != self._load or self._fresh_tokens:
            self._load, self._fresh_tokens = load, 0
            self._changed.add(self)

    def told_cache(self) -> None:
        """What changed in its cache arrives."""
        changes = self.node.changes_since(self._prefixes.position)
        if changes is not None:
            self._prefixes.take(
                CacheReport(
                    epoch=Epoch(1),
                    position=changes.position,
                    is_whole=changes.is_whole,
                    added=pack_names(changes.added),
                    removed=pack_names(changes.removed),
                )
            )

    def snapshot(self) -> NodeSnapshot:
        """Return the node at this moment."""
        return NodeSnapshot(
            url=self.url,
            role=self.role,
            is_up=True,
            fingerprint=FINGERPRINT,
            load=self._load,
            in_flight_requests=self.in_flight_requests,
            in_flight_tokens=self.in_flight_tokens,
            fresh_tokens=self._fresh_tokens,
            zone=self._zone,
            takes_prompts=self.role == "decode",
            backlog_tokens=self.own_tokens,
            prefixes=self._prefixes,
        )


class Dispatch:
    """Starts requests on pairs of nodes.

    Args:
        refused: Told of a request that is not started, with `error` set.
    """

    def __init__(
        self,
        fleet: Fleet,
        agenda: Agenda,
        prompts: Prompts,
        rng: random.Random,
        refused: Callable[[Journey], None],
    ) -> None:
        self._fleet, self._agenda, self._prompts = fleet, agenda, prompts
        self._refused, self._rng = refused, rng
        self._policy, self._turn = POLICIES[fleet.policy], 0
        self._prefills: list[KnownNode] = []
        self._decodes: list[KnownNode] = []
        self._by_url: dict[str, KnownNode] = {}
        self._index = PrefixIndex()
        self._changed: set[KnownNode] = set()
        self._snapshots: dict[str, list[NodeSnapshot]] = {"prefill": [], "decode": []}
        self._places, self._admission = Places(), Queue(Limits())
        self._in_line: dict[Waiting, Journey] = {}
        self._num_free, self._counted_s = 0, float("-inf")
        self._is_looking = False
        self._to_client_s = fleet.overheads.edge_s / 2

    def know(self, prefills: Sequence[PlannedNode], decodes: Sequence[PlannedNode]) -> None:
        """Send requests to these nodes, and listen to them."""
        for role, nodes, known in (
            ("prefill", prefills, self._prefills),
            ("decode", decodes, self._decodes),
        ):
            for index, node in enumerate(nodes):
                zone = f"zone-{index % self._fleet.num_zones}"
                each = KnownNode(
                    node, role, index, zone=zone, prefixes=self._index, changed=self._changed
                )
                known.append(each)
                self._snapshots[role].append(each.snapshot())
        for each in (*self._prefills, *self._decodes):
            self._by_url[each.url] = each
            self._agenda.at(self._rng.uniform(0, PROBE_INTERVAL_S), partial(self._ask_load, each))
            self._agenda.at(
                self._rng.uniform(0, DEFAULT_HEARTBEAT.interval_s), partial(self._ask_cache, each)
            )

    def arrive(self, journey: Journey) -> None:
        """A request has come, and was read."""
        now = self._agenda.now
        if not len(self._admission) and self._free() > 0:
            self._begin(journey)
            return
        expires = self._admission.expiry(now, None)
        waiting = Waiting("", 0, journey.request.num_prompt, now, expires)
        try:
            rejected = self._admission.join(waiting, now)
        except TandemError as error:
            self._refuse(journey, error)
            return
        self._in_line[waiting] = journey
        if rejected is not None:
            self._refuse(self._in_line.pop(rejected), self._admission.no_place(now))
        self._look_soon()

    def handed_off(self, journey: Journey, at_s: float) -> None:
        """Decode has spoken of a request at some time."""
        self._agenda.at(at_s + self._to_client_s, partial(self._give_back_prefill, journey))

    def ended(self, journey: Journey, at_s: float) -> None:
        """A node has told the last of a request at some time."""
        self._agenda.at(at_s + self._to_client_s, partial(self._end, journey))

    def _free(self) -> int:
        """Return how many may start now, as `tandem.router.admission`.

        What is counted holds as long as a load, not a moment: what starts is taken off, and nothing else
        makes it less before nodes tell more.
        """
        now = self._agenda.now
        holds_s = self._fresh_s if self._num_free <= 0 else max(self._fresh_s, PROBE_INTERVAL_S)
        if now - self._counted_s >= holds_s:
            self._counted_s = now
            nodes = self._snapshot()
            self._num_free = self._places.count(nodes.prefills, nodes.decodes, now)
        return self._num_free

    @property
    def _fresh_s(self) -> float:
        return COUNT_S_PER_NODE * len(self._by_url)

    def _snapshot(self) -> ClusterSnapshot:
        # Few of hundreds have changed since the last choice.
        while self._changed:
            known = self._changed.pop()
            self._snapshots[known.role][known.index] = known.snapshot()
        return ClusterSnapshot(tuple(self._snapshots["prefill"]), tuple(self._snapshots["decode"]))

    def _look_soon(self) -> None:
        if not self._is_looking and len(self._admission):
            self._is_looking = True
            self._agenda.at(self._agenda.now + max(LOOK_S, self._fresh_s), self._look)

    def _look(self) -> None:
        self._is_looking = False
        self._pump()
        self._look_soon()

    def _pump(self) -> None:
        """Start those in line that have room."""
        now = self._agenda.now
        while len(self._admission) and self._free() > 0:
            waiting = self._admission.take()
            assert waiting is not None
            journey = self._in_line.pop(waiting)
            if waiting.expires <= now:
                self._refuse(journey, self._admission.too_late(waiting, now))
            else:
                self._begin(journey)

    def _begin(self, journey: Journey) -> None:
        """Choose a pair and start both halves, as `tandem.router.request`."""
        self._num_free -= 1
        request = self._prompts.request(journey.request, journey.ticket.request_id)
        asked = Asked(
            len(request.prompt_ids), journey.request.session, PromptBlocks(request.prompt_ids)
        )
        pair = choose(
            self._snapshot(), FINGERPRINT, self._policy, self._turn, self._rng, asked=asked
        )
        self._turn += 1
        decode = self._by_url[pair.decode]
        num_kept = asked.cached_tokens(decode.snapshot())
        threshold = self._fleet.local_prefill_threshold
        is_local = stays_on_decode(request, decode.snapshot(), threshold, num_kept)
        journey.decode = decode.index
        decode.count(1, asked.num_tokens)
        decode.expect(asked.num_tokens)
        if is_local:
            journey.num_own = tokens_to_compute(request, num_kept)
            decode.own(journey.num_own)
            decode.node.start(journey.ticket, StartColocated(request=request))
        else:
            self._begin_pair(journey, request, pair, asked)

    def _begin_pair(
        self, journey: Journey, request: GenerateRequest, pair: Pair, asked: Asked
    ) -> None:
        prefill, decode = self._by_url[pair.prefill], self._by_url[pair.decode]
        journey.prefill, room = prefill.index, Room(self._turn)
        prefill.count(1, asked.num_tokens)
        prefill.expect(asked.num_tokens - asked.cached_tokens(prefill.snapshot()))
        start_decode = StartDecode(
            request=request, room=room, bootstrap_host="", bootstrap_port=prefill.index
        )
        decode.node.start(journey.ticket, start_decode)
        prefill.node.start(journey.ticket, StartPrefill(request=request, room=room))

    def _give_back_prefill(self, journey: Journey) -> None:
        if journey.prefill >= 0:
            self._prefills[journey.prefill].count(-1, -journey.request.num_prompt)
        else:
            self._decodes[journey.decode].own(-journey.num_own)

    def _end(self, journey: Journey) -> None:
        """Give the places back; of one that prefill ended, decode does not know yet."""
        if journey.is_ended:
            return
        journey.is_ended = True
        decode = self._decodes[journey.decode]
        decode.count(-1, -journey.request.num_prompt)
        if not journey.is_handed_off:
            self._give_back_prefill(journey)
            decode.node.deliver(partial(decode.node.role.cancel, journey.ticket))
        self._pump()

    def _refuse(self, journey: Journey, error: TandemError) -> None:
        journey.error = error.message
        self._refused(journey)

    def _ask_load(self, known: KnownNode) -> None:
        """Have a node tell its load; ask again an interval later."""
        known.node.report(partial(self._hear, known))
        self._agenda.at(self._agenda.now + PROBE_INTERVAL_S, partial(self._ask_load, known))

    def _hear(self, known: KnownNode, report: Report) -> None:
        self._agenda.at(
            report.at_s + self._fleet.overheads.message_s, partial(known.told, report.load)
        )

    def _ask_cache(self, known: KnownNode) -> None:
        known.told_cache()
        interval_s = DEFAULT_HEARTBEAT.interval_s
        self._agenda.at(self._agenda.now + interval_s, partial(self._ask_cache, known))
