"""What decode's driver, its links and its role with a pool of pages do, on the real table.

`receiver.py`, `prefill_links.py` and the part of the role that owns pages, without threads, sockets
and bytes.
"""

from dataclasses import dataclass, field

from tandem.kvtransfer.receiver import ReceiverTimeouts
from tandem.kvtransfer.session import (
    OVER,
    Action,
    CorruptedArrived,
    Fenced,
    LandedArrived,
    LinkLost,
    LinkReady,
    ReceiverState,
    ReleasedArrived,
    Session,
    TimedOut,
    UnexpectedEvent,
    WithdrawAsked,
)
from tests.kvtransfer.model.records import Record

FREE, GRANTED, QUARANTINED, HELD = "free", "granted", "quarantined", "held"
NOBODY = -1
TIMEOUTS = ReceiverTimeouts()


@dataclass
class ReceiverRoom(Record):
    """`_Room` of the agent."""

    link: int
    pages: tuple
    state: ReceiverState = ReceiverState.RESERVING
    deadline_s: float = float("inf")


@dataclass
class Decode(Record):
    """One life of a decode node.

    Attributes:
        pool: By page, its state and the room it is of.
        filled: By page, how many pieces of which prompt page have landed since it was granted.
        link: The one that is kept, -1 for none.
        outbox: What the role has not taken yet.
    """

    epoch: int
    pool: dict
    is_stopped: bool = False
    filled: dict = field(default_factory=dict)
    rooms: dict = field(default_factory=dict)
    link: int = -1
    is_up: bool = False
    connect_deadline_s: float = 0.0
    fencing: list = field(default_factory=list)
    fenced: set = field(default_factory=set)
    posts: list = field(default_factory=list)
    outbox: list = field(default_factory=list)
    asked: set = field(default_factory=set)
    ended: set = field(default_factory=set)
    withdrawn: set = field(default_factory=set)

    @classmethod
    def with_pages(cls, epoch, pool_pages):
        return cls(epoch, dict.fromkeys(range(pool_pages), (FREE, NOBODY)))

    # ── the role ─────────────────────────────────────────────────────────────────────────────────

    def free_pages(self):
        return [page for page, (state, _) in self.pool.items() if state == FREE]

    def pages_of(self, room):
        return [page for page, (_, owner) in self.pool.items() if owner == room]

    def request(self, world, room):
        pages = tuple(self.free_pages()[: world.plan.num_pages])
        self._move(pages, GRANTED, room)
        for page in pages:
            self.filled[page] = ()
        self.asked.add(room)
        self.posts.append(("request", room, pages))

    def withdraw(self, room):
        self.withdrawn.add(room)
        self._move(self.pages_of(room), QUARANTINED, room)
        self.posts.append(("apply", room, WithdrawAsked))

    def poll(self, world):
        """Take what the agent told, as `Outbox` gives it to a role that may have withdrawn."""
        told, self.outbox = self.outbox, []
        for kind, room in told:
            world.check(room not in self.ended, f"decode's role heard twice of room {room}")
            pages, is_last = self.pages_of(room), kind != "lost"
            if is_last:
                self.ended.add(room)
            heard = kind if room not in self.withdrawn else "safe" if is_last else None
            states = {self.pool[page][0] for page in pages}
            match heard:
                case "landed":
                    world.check(states == {GRANTED}, f"room {room} landed in pages of another")
                    full = {(room, i): world.plan.num_pieces for i in range(len(pages))}
                    landed = dict(pair for page in pages for pair in self.filled[page])
                    world.check(landed == full, f"room {room} landed without all its bytes")
                    self._move(pages, HELD, room)
                case "failed":
                    world.check(states == {GRANTED}, f"room {room} failed in pages of another")
                    self._move(pages, FREE, NOBODY)
                case "lost":
                    self._move(pages, QUARANTINED, room)
                case "safe":
                    world.check(states == {QUARANTINED}, f"room {room} is safe without a reason")
                    self._move(pages, FREE, NOBODY)

    def run_to_the_end(self, room):
        """The request that holds the pages is answered."""
        self._move(self.pages_of(room), FREE, NOBODY)

    def is_running(self, room):
        return any(entry == (HELD, room) for entry in self.pool.values())

    def _move(self, pages, state, room):
        for page in pages:
            self.pool[page] = (state, room)

    def land(self, world, room, page, index):
        """A piece of a write reaches memory."""
        state, owner = self.pool[page]
        world.check(
            owner == room and state in (GRANTED, QUARANTINED),
            f"a write of room {room} landed in page {page}, {state} of room {owner}",
        )
        pieces = dict(self.filled[page])
        pieces[room, index] = min(pieces.get((room, index), 0) + 1, world.plan.num_pieces)
        self.filled[page] = tuple(sorted(pieces.items()))

    # ── the control thread ───────────────────────────────────────────────────────────────────────

    def run_post(self, world):
        kind, subject, value = self.posts.pop(0)
        match kind:
            case "apply":
                self.apply(world, subject, value)
            case "request":
                self._request(world, subject, value)
            case "fenced":
                for room in self._rooms_of(subject):
                    self.apply(world, room, Fenced)

    def hear(self, world, number, message):
        if number != self.link:
            return
        match message[0]:
            case "refused":
                self.drop(world)
            case "welcome":
                self.is_up = True
                for room in self._rooms_of(number):
                    self.apply(world, room, LinkReady)
            case "landed" | "released" | "corrupted":
                self._hear_last_word(world, *message)

    def _hear_last_word(self, world, kind, room):
        entry = self.rooms.get(room)
        if entry is None or entry.link != self.link:
            return
        events = {
            "landed": LandedArrived,
            "released": ReleasedArrived,
            "corrupted": CorruptedArrived,
        }
        try:
            self.apply(world, room, events[kind])
        except UnexpectedEvent:
            self.drop(world)

    def drop(self, world):
        """Lose the link and begin to fence it."""
        if self.link < 0:
            return
        number, self.link, self.is_up = self.link, -1, False
        world.hang_up(number)
        for room in self._rooms_of(number):
            self.apply(world, room, LinkLost)
        self.fencing.append(number)
        if "call a fence done when it begins" in world.rules.habits:
            self.posts.append(("fenced", number, None))

    def fence(self, world, number):
        """The fence is done: what was under way is cut off."""
        self.fencing.remove(number)
        self.fenced.add(number)
        world.flying = [piece for piece in world.flying if piece[0] != number]
        self.posts.append(("fenced", number, None))

    def time_out(self, world, room):
        if self.rooms[room].state is ReceiverState.GRANTED:
            self.apply(world, room, TimedOut)
        elif self.rooms[room].link == self.link:
            self.drop(world)

    def waits(self):
        """Yield the rooms for which time counts, each with its deadline."""
        for room, entry in self.rooms.items():
            if entry.state in (ReceiverState.GRANTED, ReceiverState.WITHDRAWN):
                yield room, entry.deadline_s

    def _request(self, world, room, pages):
        if self.link < 0:
            self.link = world.open_link(self.epoch)
            self.connect_deadline_s = world.now_s + TIMEOUTS.connect_s
        self.rooms[room] = ReceiverRoom(self.link, pages)
        if self.is_up:
            self.apply(world, room, LinkReady)

    def _rooms_of(self, number):
        return [room for room, entry in self.rooms.items() if entry.link == number]

    def apply(self, world, room, event):
        if (entry := self.rooms.get(room)) is None:
            return
        session = Session(world.rules.receiver, entry.state)
        actions = session.apply(event())
        entry.state = session.state
        for action in actions:
            self._act(world, room, entry, action)
        if entry.state in OVER:
            del self.rooms[room]
            world.ends_of_decode[room] = entry.state

    def _act(self, world, room, entry, action):
        match action:
            case Action.SEND_GRANT:
                entry.deadline_s = world.now_s + TIMEOUTS.landed_s
                world.say_to_prefill(entry.link, ("grant", room, entry.pages))
            case Action.SEND_WITHDRAW:
                entry.deadline_s = world.now_s + TIMEOUTS.released_s
                world.say_to_prefill(entry.link, ("withdraw", room))
            case Action.TELL_LANDED:
                self.outbox.append(("landed", room))
            case Action.TELL_FAILED:
                self.outbox.append(("failed", room))
            case Action.TELL_LOST:
                self.outbox.append(("lost", room))
            case Action.TELL_SAFE:
                self.outbox.append(("safe", room))
            case Action.PERMIT | Action.REVOKE | Action.FENCE:
                pass  # `land` assumes a transport that checks nothing: only a fence stops a write
