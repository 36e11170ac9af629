"""Both ends, the network between them, and all that happens next by itself.

```
 due       what a live system does by itself: deliver, compute, write, land, poll, notice a death
 timers    what time alone does: a deadline, or a heartbeat that did not come
 faults    what it must survive: in `faults.py`
```

Messages stay in order on one connection and in no order across connections; pieces of writes travel
beside them and land at any time, or never, until the fence. The memory checks nothing by itself, as
with one-sided writes: what protects a page is the protocol alone.
"""

from dataclasses import dataclass, field

from tandem.kvtransfer.session import UnexpectedEvent
from tests.kvtransfer.model.decode import FREE, HELD, NOBODY, Decode
from tests.kvtransfer.model.prefill import Prefill
from tests.kvtransfer.model.records import Record
from tests.kvtransfer.model.rules import AGREEING, NOTICE_S, STOPPED_S, Violation


@dataclass
class Connection(Record):
    """The control channel of one link. What is sent on a broken one is lost."""

    decode_epoch: int
    prefill_epoch: int = 0
    to_prefill: list = field(default_factory=list)
    to_decode: list = field(default_factory=list)
    is_broken: bool = False
    is_hung_up: bool = False  # decode closed its socket
    sick_since_s: float = 0.0


@dataclass
class World(Record):
    """All of it at one moment.

    Attributes:
        flying: Pieces of writes: link, room, decode's page, index in the prompt.
        ends_of_prefill: By room, how it ended there; likewise for decode.
        happened: Kinds of faults so far.
    """

    faults_left: int
    prefill: Prefill | None
    decode: Decode | None
    links: dict = field(default_factory=dict)
    flying: list = field(default_factory=list)
    ends_of_prefill: dict = field(default_factory=dict)
    ends_of_decode: dict = field(default_factory=dict)
    happened: set = field(default_factory=set)
    seen_epochs: list = field(default_factory=lambda: [1, 1])
    expected: set = field(default_factory=set)
    requested: set = field(default_factory=set)
    now_s: float = 0.0
    stopped_at_s: float = 0.0

    @classmethod
    def begin(cls, plan, rules):
        """Both ends are up, and nothing was asked of them yet."""
        world = cls(plan.faults, Prefill(1), Decode.with_pages(1, plan.pool_pages))
        world.plan, world.rules = plan, rules
        return world

    def copy(self):
        new = super().copy()
        new.plan, new.rules = self.plan, self.rules
        return new

    # ── network ──────────────────────────────────────────────────────────────────────────────────

    def open_link(self, decode_epoch):
        number = len(self.links)
        self.links[number] = Connection(decode_epoch, to_prefill=[("hello",)])
        return number

    def say_to_prefill(self, number, message):
        if not self.links[number].is_broken:
            self.links[number].to_prefill.append(message)

    def say_to_decode(self, number, message):
        if not (self.links[number].is_broken or self.links[number].is_hung_up):
            self.links[number].to_decode.append(message)

    def hang_up(self, number):
        link = self.links[number]
        link.is_hung_up, link.sick_since_s = True, self.now_s
        link.to_decode.clear()

    def is_cut_off(self, number):
        """Whether a write over this link must fail at once."""
        decode = self.decode
        return (
            decode is None
            or self.links[number].decode_epoch != decode.epoch
            or number in decode.fenced
        )

    def sicken(self, number):
        link = self.links[number]
        if not link.is_broken:
            link.is_broken, link.sick_since_s = True, self.now_s

    def _is_lost_to_prefill(self, number):
        link = self.links[number]
        return link.is_broken or link.is_hung_up

    # ── what can happen ──────────────────────────────────────────────────────────────────────────

    def due(self):
        """Return what a live system does by itself, in a fixed order."""
        return [*self._due_at_prefill(), *self._due_at_decode(), *self._due_in_flight()]

    def _due_at_prefill(self):
        prefill = self.prefill
        if prefill is None or prefill.is_stopped:
            return
        for room in range(self.plan.num_rooms):
            if room not in self.expected:
                yield ("expect", room)
        for room, pushed in prefill.role.items():
            if pushed <= self.plan.num_pages and room not in prefill.ended:
                yield ("compute", room)
        if prefill.posts:
            yield ("prefill posts",)
        for number, worker in prefill.workers.items():
            if worker.queue and not worker.running and not worker.is_closed:
                yield ("start job", number)
            if worker.running and (worker.is_closed or self.is_cut_off(number)):
                yield ("job fails", number)
        for number, link in self.links.items():
            if link.to_prefill and link.prefill_epoch in (0, prefill.epoch):
                yield ("prefill hears", number)

    def _due_at_decode(self):
        decode = self.decode
        if decode is None or decode.is_stopped:
            return
        if len(decode.free_pages()) >= self.plan.num_pages:
            room = next((r for r in range(self.plan.num_rooms) if r not in self.requested), None)
            if room is not None:
                yield ("request", room)
        if decode.posts:
            yield ("decode posts",)
        if decode.outbox:
            yield ("decode polls",)
        for room in range(self.plan.num_rooms):
            if decode.is_running(room):
                yield ("run to the end", room)
        if decode.link >= 0 and self.links[decode.link].to_decode:
            yield ("decode hears", decode.link)
        for number in decode.fencing:
            if self.plan.is_one_sided or all(piece[0] != number for piece in self.flying):
                yield ("fence", number)

    def _due_in_flight(self):
        if self.flying and (self.plan.is_one_sided or not self.prefill.is_stopped):
            for piece in sorted(set(self.flying)):
                yield ("land", piece)

    def timers(self):
        """Return (when, what) for all that only time brings about."""
        found = []
        if (prefill := self.prefill) is not None and not prefill.is_stopped:
            found += [(due_s, ("prefill timer", room)) for room, due_s in prefill.waits()]
            found += [
                (self.links[number].sick_since_s + NOTICE_S, ("prefill notices", number))
                for number in prefill.links
                if self._is_lost_to_prefill(number) or self._is_away(self.decode)
            ]
        if (decode := self.decode) is not None and not decode.is_stopped:
            found += [(due_s, ("decode timer", room)) for room, due_s in decode.waits()]
            if decode.link >= 0:
                link = self.links[decode.link]
                if not decode.is_up:
                    found.append((decode.connect_deadline_s, ("decode notices", decode.link)))
                elif link.is_broken or self._is_away(self.prefill):
                    found.append((link.sick_since_s + NOTICE_S, ("decode notices", decode.link)))
        for who in ("prefill", "decode"):
            if (end := getattr(self, who)) is not None and end.is_stopped:
                found.append((self.stopped_at_s + STOPPED_S, ("go on", who)))
        return found

    def _is_away(self, end):
        return end is None or end.is_stopped

    # ── doing it ─────────────────────────────────────────────────────────────────────────────────

    def do(self, what, subject=None):
        try:
            getattr(self, "_do_" + what.replace(" ", "_"))(subject)
        except UnexpectedEvent as error:
            raise Violation(f"{what} {subject}: {error}") from error
        self.check_pages()

    def _do_expect(self, room):
        self.expected.add(room)
        self.prefill.expect(room)

    def _do_compute(self, room):
        self.prefill.compute(self, room)

    def _do_prefill_posts(self, _):
        self.prefill.run_post(self)

    def _do_start_job(self, number):
        self.prefill.start_job(self, number)

    def _do_job_fails(self, number):
        self.prefill.fail_job(self, number)

    def _do_prefill_hears(self, number):
        self.prefill.hear(self, number, self.links[number].to_prefill.pop(0))

    def _do_request(self, room):
        self.requested.add(room)
        self.decode.request(self, room)

    def _do_decode_posts(self, _):
        self.decode.run_post(self)

    def _do_decode_polls(self, _):
        self.decode.poll(self)

    def _do_run_to_the_end(self, room):
        self.decode.run_to_the_end(room)

    def _do_decode_hears(self, number):
        self.decode.hear(self, number, self.links[number].to_decode.pop(0))

    def _do_fence(self, number):
        self.decode.fence(self, number)

    def _do_land(self, piece):
        number, room, page, index = piece
        self.flying.remove(piece)
        if self.is_cut_off(number):
            return  # the memory is gone
        self.decode.land(self, room, page, index)
        if self.prefill is not None and self.links[number].prefill_epoch == self.prefill.epoch:
            self.prefill.piece_landed(number, room, index)

    def _do_prefill_timer(self, room):
        self.prefill.time_out(self, room)

    def _do_decode_timer(self, room):
        self.decode.time_out(self, room)

    def _do_prefill_notices(self, number):
        self.prefill.drop(self, number)

    def _do_decode_notices(self, _):
        self.decode.drop(self)

    def _do_go_on(self, who):
        getattr(self, who).is_stopped = False

    # ── promises ─────────────────────────────────────────────────────────────────────────────────

    def check(self, is_kept, promise_broken):
        if not is_kept:
            raise Violation(promise_broken)

    def check_pages(self):
        """Every page is of nobody and free, or of a room that still lives."""
        if (decode := self.decode) is None:
            return
        for page, (state, room) in decode.pool.items():
            is_live = room in decode.asked and room not in decode.ended
            self.check(
                room == NOBODY if state == FREE else is_live or state == HELD,
                f"page {page} is {state}, of room {room}",
            )

    def check_end(self):
        """Nothing happens any more: everything is back, and the two ends agree."""
        if (decode := self.decode) is not None:
            self.check(len(decode.free_pages()) == self.plan.pool_pages, "a page is not back")
            self.check(not decode.rooms and not decode.fencing, "decode still has a room")
            self.check(decode.asked == decode.ended, "decode's role was not told the end")
        if (prefill := self.prefill) is not None:
            self.check(not prefill.rooms, "prefill still has a room")
            self.check(set(prefill.role) == prefill.ended, "prefill's role was not told the end")
        for room in range(self.plan.num_rooms):
            ends = self.ends_of_prefill.get(room), self.ends_of_decode.get(room)
            allowed = AGREEING.get(ends, frozenset())
            self.check(
                allowed is None or allowed & self.happened,
                f"room {room} ended as {ends} after {sorted(self.happened) or 'nothing'}",
            )
