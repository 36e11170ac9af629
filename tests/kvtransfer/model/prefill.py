"""What prefill's driver, its links, its push workers and its role do, on the real table.

`sender.py`, `bootstrap.py` and `push_worker.py` without threads, sockets and bytes: what a thread
posts to the control thread lies in `posts` until it is run.
"""

from dataclasses import dataclass, field

from tandem.kvtransfer.sender import WAITS, SenderTimeouts
from tandem.kvtransfer.session import (
    OVER,
    AbortAsked,
    Action,
    Expected,
    GrantArrived,
    LinkLost,
    SenderState,
    Session,
    TimedOut,
    WithdrawArrived,
    WriteFailed,
    WritesDone,
    WritesStopped,
)
from tests.kvtransfer.model.records import Record

END = -1  # the job behind the last page: checksums, then WritesDone
TIMEOUTS = SenderTimeouts()


@dataclass
class SenderRoom(Record):
    """`PushRoom`; pages are named by their index in the prompt."""

    deadline_s: float
    state: SenderState = SenderState.NEW
    link: int = -1
    pages: tuple = ()
    is_granted: bool = False
    pending: list = field(default_factory=list)
    is_finished: bool = False


@dataclass
class Worker(Record):
    """`PushWorker`: one job at a time."""

    queue: list = field(default_factory=list)
    running: tuple = ()  # room, index
    num_flying: int = 0  # pieces of the running write that have not landed
    stops: list = field(default_factory=list)
    is_closed: bool = False


@dataclass
class Prefill(Record):
    """One life of a prefill node.

    Attributes:
        workers: By link, as long as the link is kept or a write of it is under way.
        links: Those that are kept.
        role: By room, how many pages the role has pushed; one more once it has finished.
    """

    epoch: int
    is_stopped: bool = False
    rooms: dict = field(default_factory=dict)
    workers: dict = field(default_factory=dict)
    links: set = field(default_factory=set)
    posts: list = field(default_factory=list)
    role: dict = field(default_factory=dict)
    ended: set = field(default_factory=set)
    aborted: set = field(default_factory=set)

    # ── the role ─────────────────────────────────────────────────────────────────────────────────

    def expect(self, room):
        self.role[room] = 0
        self.posts.append(("apply", room, Expected))

    def compute(self, world, room):
        """Push one more page, or finish behind the last."""
        index, self.role[room] = self.role[room], self.role[room] + 1
        is_last = index == world.plan.num_pages
        self.posts.append(("finish", room, None) if is_last else ("push", room, index))

    def abort(self, room):
        self.aborted.add(room)
        self.posts.append(("apply", room, AbortAsked))

    # ── the control thread ───────────────────────────────────────────────────────────────────────

    def run_post(self, world):
        kind, subject, value = self.posts.pop(0)
        match kind:
            case "apply":
                self.apply(world, subject, value)
            case "push":
                self._push(subject, value)
            case "finish":
                self._finish(world, subject)
            case "break":
                self.drop(world, subject)

    def hear(self, world, number, message):
        if message[0] == "hello":
            self.links.add(number)
            self.workers[number] = Worker()
            world.links[number].prefill_epoch = self.epoch
            world.say_to_decode(number, ("welcome",))
        elif number not in self.links:
            world.say_to_decode(number, ("refused",))
        elif message[0] == "grant":
            self._take_grant(world, number, message)
        elif (entry := self.rooms.get(message[1])) is not None and entry.link == number:
            self.apply(world, message[1], WithdrawArrived)
        elif "pass over the Withdraw of an unknown room" not in world.rules.habits:
            world.say_to_decode(number, ("released", message[1]))

    def _take_grant(self, world, number, message):
        _, room, pages = message
        entry = self.rooms.get(room)
        if entry is not None and entry.is_granted:
            if entry.link == number and "release a second grant" not in world.rules.habits:
                return self.drop(world, number)
            return world.say_to_decode(number, ("released", room))
        entry = entry or self._open(world, room, TIMEOUTS.early_grant_s)
        entry.link, entry.pages, entry.is_granted = number, pages, True
        return self.apply(world, room, GrantArrived)

    def drop(self, world, number):
        """Lose a link: its worker hangs up and every room of it is told."""
        if number not in self.links:
            return
        world.say_to_decode(number, ("refused",))
        self.links.discard(number)
        worker = self.workers[number]
        worker.is_closed = True
        worker.queue.clear()
        for room, entry in list(self.rooms.items()):
            if entry.link == number:
                self.apply(world, room, LinkLost)

    def time_out(self, world, room):
        self.apply(world, room, TimedOut)

    def waits(self):
        """Yield the rooms for which time counts, each with its deadline."""
        for room, entry in self.rooms.items():
            if entry.state in WAITS:
                yield room, entry.deadline_s

    def _open(self, world, room, timeout_s):
        entry = self.rooms[room] = SenderRoom(world.now_s + timeout_s)
        return entry

    def _push(self, room, index):
        entry = self.rooms.get(room)
        if entry is None:
            return
        if entry.state is SenderState.WAITING:
            entry.pending.append(index)
        elif entry.state is SenderState.PUSHING:
            self.workers[entry.link].queue.append((room, index))

    def _finish(self, world, room):
        if (entry := self.rooms.get(room)) is None:
            return
        entry.is_finished = True
        if entry.state is not SenderState.PUSHING:
            return
        if "say Landed before the writes are done" in world.rules.habits:
            self.posts.append(("apply", room, WritesDone))
        else:
            self.workers[entry.link].queue.append((room, END))

    def apply(self, world, room, event):
        entry = self.rooms.get(room)
        if entry is None:
            if event is not Expected:
                return
            entry = self._open(world, room, TIMEOUTS.grant_s)
        before, session = entry.state, Session(world.rules.sender, entry.state)
        actions = session.apply(event())
        entry.state = session.state
        for action in actions:
            self._act(world, room, entry, action)
        if entry.state is SenderState.REFUSING and before is not entry.state:
            entry.deadline_s = world.now_s + TIMEOUTS.early_grant_s
        if entry.state in OVER:
            self.rooms.pop(room, None)
            world.ends_of_prefill.setdefault(
                room, entry.state
            )  # a room twice granted may come back

    def _act(self, world, room, entry, action):
        match action:
            case Action.TELL_GRANTED:
                pending, entry.pending = entry.pending, []
                for index in pending:
                    self._push(room, index)
                if entry.is_finished:
                    self._finish(world, room)
            case Action.STOP_WRITES:
                self._stop(world, room, self.workers[entry.link])
            case Action.SEND_LANDED | Action.SEND_RELEASED:
                if entry.link in self.links:
                    word = "landed" if action is Action.SEND_LANDED else "released"
                    world.say_to_decode(entry.link, (word, room))
            case Action.TELL_PUSHED | Action.TELL_RELEASED:
                world.check(room not in self.ended, f"prefill's role heard twice of room {room}")
                self.ended.add(room)
                is_writing = any(each.running[:1] == (room,) for each in self.workers.values())
                world.check(not is_writing, f"prefill reuses pages of room {room} under a write")

    # ── the worker ───────────────────────────────────────────────────────────────────────────────

    def start_job(self, world, number):
        """The worker takes its next job. A write goes out in pieces that land when they like."""
        worker = self.workers[number]
        room, index = worker.queue.pop(0)
        if index == END:
            self.posts.append(("apply", room, WritesDone))
        elif world.is_cut_off(number):
            self.posts.append(("break", number, None))
        else:
            worker.running, worker.num_flying = (room, index), world.plan.num_pieces
            world.check(room in self.rooms, f"a write of room {room}, which is over, begins")
            page = self.rooms[room].pages[index]
            world.flying += [(number, room, page, index)] * worker.num_flying

    def piece_landed(self, number, room, index):
        worker = self.workers.get(number)
        if worker is None or worker.running != (room, index):
            return
        worker.num_flying -= 1
        if not worker.num_flying:
            self._settle(worker)

    def fail_job(self, world, number, event=None):
        """The write under way fails: it was hung up on, or refused (then none of it is under way)."""
        worker = self.workers[number]
        room, _ = worker.running
        is_refused = event is WriteFailed
        if "release after a write that broke" in world.rules.habits:
            event = WriteFailed
        self.posts.append(("break", number, None) if event is None else ("apply", room, event))
        if is_refused or not world.plan.is_one_sided:
            world.flying = [piece for piece in world.flying if piece[:2] != (number, room)]
        self._settle(worker)

    def _settle(self, worker):
        worker.running, worker.num_flying = (), 0
        for room in worker.stops:
            self.posts.append(("apply", room, WritesStopped))
        worker.stops.clear()

    def _stop(self, world, room, worker):
        worker.queue = [job for job in worker.queue if job[0] != room]
        is_running = worker.running[:1] == (room,)
        if is_running and "stop without waiting for the write" not in world.rules.habits:
            worker.stops.append(room)
        else:
            self.posts.append(("apply", room, WritesStopped))
