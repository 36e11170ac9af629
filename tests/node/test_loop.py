"""The engine loop with a recording role, over the real wire protocol."""

import os

import pytest

from tandem.engine.errors import DeviceLost
from tandem.node.answers import Answers, Ticket
from tandem.node.life.engine_process import DrainOrder, Resume
from tandem.node.loop import PROBE_INTERVAL_S, EngineLoop
from tandem.node.metrics import Measures
from tandem.wire.channel import DEFAULT_HEARTBEAT, Inbox, Link, Peer, Waker, wait
from tandem.wire.errors import EngineFailed, InvalidRequest, Overloaded, PeerBehind, PeerLost
from tandem.wire.generation import (
    Epoch,
    Finish,
    GenerateRequest,
    RequestId,
    SamplingParams,
    TokenLogprobs,
)
from tandem.wire.messages import (
    AdapterChanged,
    CacheReport,
    Cancel,
    FlushCache,
    FromEngine,
    LoadAdapter,
    LoadedAdapter,
    Measured,
    NodeLoad,
    Ping,
    Pong,
    RequestFailed,
    StartColocated,
    ToEngine,
    TokenBatch,
)
from tandem.wire.prefixes import PrefixJournal, pack_names
from tests.patience import PATIENCE_S, Clock, patiently, until

EPOCH = Epoch(9)


def bug(*_):
    raise ZeroDivisionError("a bug")


class RecordingRole:
    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.started: list[Ticket] = []
        self.cancelled: list[Ticket] = []
        self.refusal: Exception | None = None
        self.bug: Exception | None = None
        self.failures = []
        self.is_talking = True

    has_work = True
    adapters = ()

    def tickets(self):
        return list(self.started)

    def start(self, ticket, message):
        if self.refusal:
            raise self.refusal
        self.started.append(ticket)

    def cancel(self, ticket):
        if ticket in self.started:
            self.started.remove(ticket)
            self.cancelled.append(ticket)

    def poll(self):
        pass

    def step(self):
        if self.bug:
            raise self.bug
        for ticket in self.started if self.is_talking else ():
            self.answers.token(ticket, 0, [5], Finish(reason="length"))

    def fail_all(self, error):
        self.failures.append(error)

    def hand_over(self, error):
        for ticket in self.started:
            self.answers.fail(ticket, error)
        self.started.clear()

    def flush_cache(self):
        pass

    def change_adapter(self, change, answer):
        if change.path == "/bad":
            raise InvalidRequest("no adapter")
        self.adapters = [LoadedAdapter(id=f"{change.name}@1", path=change.path)]
        answer(f"{change.name}@1")

    def load(self):
        return NodeLoad(num_running=len(self.started), adapters=self.adapters)

    def log_line(self, elapsed_s):
        return None


class SlowInbox(Inbox[ToEngine]):
    """An inbox whose peers read only when a test lets them."""

    is_read = True

    def send(self, peer, message) -> None:
        if not self.is_read:
            raise PeerBehind("it does not read")
        super().send(peer, message)


class Rig:
    """A loop, the link of one edge worker, and a fake clock."""

    def __init__(self) -> None:
        self.clock = Clock(100.0)
        self.inbox = SlowInbox("tcp://127.0.0.1:0", ToEngine)
        self.waker = Waker()
        self.journal = PrefixJournal()
        self.tiers = {"host": PrefixJournal(), "disk": PrefixJournal()}
        answers = Answers(self.inbox, EPOCH, self.journal, self.tiers)
        self.measures = Measures()
        self.role = RecordingRole(answers)
        self.drained: list[int] = []
        self.loop = EngineLoop(
            self.role,
            self.inbox,
            answers,
            self.waker,
            clock=self.clock,
            measures=self.measures,
            on_drained=self.drained.append,
        )
        self.link: Link[FromEngine] = Link(self.inbox.address, FromEngine)

    def send(self, message) -> None:
        for _ in patiently():
            try:
                return self.link.send(message)
            except PeerLost:
                wait([self.link], 0.01)
        raise AssertionError("no connection")

    def begin(self, *names: str) -> None:
        """Start requests and run passes until they reach the role."""
        for name in names:
            self.send(start(name))
        self.pass_until(lambda: len(self.role.started) == len(names))

    def fall_silent(self) -> None:
        """Advance the clock until an edge worker counts as lost, and run a pass."""
        self.clock.now_s += DEFAULT_HEARTBEAT.silence_s + 0.1
        self.loop.run_once(0)

    def pass_until(self, is_done) -> None:
        self.loop.run_once(0.01)
        until(is_done, lambda: self.loop.run_once(0.01))

    def answer(self):
        for _ in patiently():
            if (message := self.link.receive()) is not None:
                return message
            wait([self.link], 0.01)
        raise AssertionError("no answer")

    def answers(self, num: int) -> list:
        """Return the next answers to messages, of which one pass may find only the first."""
        told = []

        def is_told() -> bool:
            while len(told) < num and (message := self.link.receive()) is not None:
                told.append(message)
            return len(told) == num

        self.pass_until(is_told)
        return told

    def lose_edge(self) -> None:
        """Close the edge worker's link, as the kernel does for a killed process."""
        self.link.close()
        (peer,) = {ticket.peer for ticket in self.role.started}
        for _ in patiently():
            try:
                self.inbox.send(peer, Pong(epoch=EPOCH, load=NodeLoad()))
            except PeerLost:
                return
            wait([self.inbox], 0.01)
        raise AssertionError("the link stands")

    def close(self) -> None:
        self.link.close()
        self.inbox.close()
        self.waker.close()


@pytest.fixture
def rig():
    made = Rig()
    yield made
    made.close()


def start(name: str) -> StartColocated:
    request = GenerateRequest(request_id=RequestId(name), prompt_ids=[1], sampling=SamplingParams())
    return StartColocated(request=request)


class Told:
    """An inbox that records sent messages."""

    def __init__(self) -> None:
        self.sent = []
        self.is_read = True

    def send(self, peer, message) -> None:
        if not self.is_read:
            raise PeerBehind("it does not read")
        self.sent.append(message)


def test_edge_worker_that_reads_again_receives_every_failure():
    inbox = Told()
    answers, ticket = Answers(inbox, EPOCH), Ticket(Peer(b"edge"), RequestId("a"), 0, 1)
    inbox.is_read = False
    answers.token(ticket, 0, [5], Finish(reason="length"))
    answers.flush()
    assert answers.take_unreachable() == {ticket.peer}
    answers.fail(ticket, PeerLost("the edge worker was silent for too long"))
    answers.flush()
    inbox.is_read = True
    answers.flush()
    answers.flush()
    (failure,) = inbox.sent
    assert (failure.request_id, failure.error.code) == ("a", "peer_lost")


def test_plain_tokens_are_columns_and_tokens_after_a_delta_are_deltas():
    inbox = Told()
    answers = Answers(inbox, EPOCH)
    tickets = [
        Ticket(Peer(b"edge"), RequestId(name), 0, number) for number, name in enumerate("ab", 1)
    ]
    for ticket in tickets:
        answers.token(ticket, 3, [30])
    answers.token(tickets[0], 4, [40], cached_tokens=1)
    answers.token(tickets[0], 5, [50])
    answers.token(tickets[1], 4, [41], Finish(reason="length"))
    answers.flush()
    answers.token(tickets[0], 6, [60])
    answers.flush()
    first, second = inbox.sent
    assert (first.streams, first.indexes, first.token_ids) == ([1, 2], [3, 3], [30, 30])
    assert [(d.request_id, d.index) for d in first.deltas] == [("a", 4), ("a", 5), ("b", 4)]
    assert (second.streams, second.indexes, second.token_ids, second.deltas) == ([1], [6], [60], [])


def test_all_edge_workers_have_the_load_with_an_adapter_before_its_sender_has_the_answer(rig):
    own, rig.link = rig.link, Link(rig.inbox.address, FromEngine)
    rig.send(Ping())
    rig.answers(1)
    other, rig.link = rig.link, own
    rig.send(LoadAdapter(name="sql", path="/sql", number=7))
    load, answer = rig.answers(2)
    assert [each.id for each in load.load.adapters] == ["sql@1"]
    assert answer == AdapterChanged(epoch=EPOCH, number=7, adapter="sql@1")
    rig.link = other
    assert rig.answers(1)[0].load.adapters == load.load.adapters
    own.close()


def test_adapter_that_the_role_rejects_is_answered_with_the_error(rig):
    rig.send(LoadAdapter(name="sql", path="/bad", number=8))
    _load, answer = rig.answers(2)
    assert (answer.number, answer.adapter, answer.error.message) == (8, "", "no adapter")


def test_ping_is_answered_with_load_and_cache_changes(rig):
    rig.journal.add(7)
    rig.tiers["host"].add(7)
    rig.tiers["disk"].add(8)
    rig.tiers["disk"].add(9)
    rig.send(Ping(prefix_position=0, tier_positions={"host": 0, "disk": 1, "gone": 0}))
    load, *reports = rig.answers(4)
    assert load == Pong(epoch=EPOCH, load=NodeLoad())
    assert reports == [
        CacheReport(epoch=EPOCH, position=1, added=pack_names([7])),
        CacheReport(epoch=EPOCH, position=1, tier="host", added=pack_names([7])),
        CacheReport(epoch=EPOCH, position=2, tier="disk", added=pack_names([9])),
    ]
    rig.send(Ping(prefix_position=1))
    rig.send(Ping())
    assert [type(answer) for answer in rig.answers(2)] == [Pong, Pong]


def test_second_start_with_the_same_id_replaces_the_first(rig):
    rig.send(start("a"))
    rig.send(start("a"))
    rig.pass_until(lambda: rig.role.cancelled)
    assert rig.role.started == rig.role.cancelled


def test_edge_workers_may_use_the_same_id_at_once(rig):
    rig.role.is_talking = False
    rig.begin("a")
    own, rig.link = rig.link, Link(rig.inbox.address, FromEngine)
    rig.send(start("a"))
    rig.pass_until(lambda: len(rig.role.started) == 2)
    rig.send(Cancel(request_id=RequestId("a")))
    rig.pass_until(lambda: rig.role.cancelled)
    rig.role.is_talking = True
    rig.pass_until(lambda: own.socket.poll(0))
    assert not rig.link.socket.poll(0)
    rig.link.close()
    rig.link = own
    assert [delta.request_id for delta in rig.answer().deltas] == ["a"]


def test_rejected_request_is_answered(rig):
    rig.role.refusal = Overloaded("full")
    rig.send(start("a"))
    rig.pass_until(lambda: rig.link.socket.poll(0))
    answer = rig.answer()
    assert isinstance(answer, RequestFailed)
    assert (answer.request_id, answer.error.status) == ("a", 429)


def test_cancel_reaches_the_role(rig):
    rig.begin("a")
    rig.send(Cancel(request_id=RequestId("a")))
    rig.pass_until(lambda: rig.role.cancelled)


@pytest.mark.parametrize("is_talking", [True, False])
def test_lost_edge_worker_is_counted_once_and_its_requests_cancelled(rig, is_talking):
    rig.role.is_talking = is_talking
    rig.begin("a")
    rig.loop.order(DrainOrder(number=1, timeout_s=60))
    rig.lose_edge()
    rig.role.has_work = is_talking
    for _ in range(10):
        rig.clock.now_s += PROBE_INTERVAL_S
        rig.loop.run_once(0)
    assert [ticket.request_id for ticket in rig.role.cancelled] == ["a"]
    assert rig.measures.num_lost_edges == 1
    rig.role.has_work = False
    rig.pass_until(lambda: rig.drained)  # the drain waits for no edge worker


def test_edge_worker_that_stops_reading_receives_its_failure_later(rig):
    rig.begin("a")
    rig.inbox.is_read = False
    for _ in range(10):
        rig.loop.run_once(0)
    assert rig.role.cancelled
    assert rig.measures.num_lost_edges == 1
    rig.inbox.is_read = True
    assert failure(rig).error.code == PeerLost.code


def test_edge_worker_without_requests_receives_only_load_changes(
    rig,
):
    told: list[NodeLoad] = []

    def probe(num_times: int) -> None:
        """Collect messages for a number of passes, since a missing message cannot be waited for."""
        for _ in range(num_times):
            rig.clock.now_s += PROBE_INTERVAL_S
            rig.loop.run_once(0)

    rig.send(Ping())
    rig.answers(1)
    rig.loop._answers.pong = lambda _peer, load: told.append(load)
    probe(3)
    assert told == []
    rig.role.load = lambda: NodeLoad(generated_tokens=1)
    probe(3)
    assert told == [NodeLoad(generated_tokens=1)]
    rig.begin("a")
    probe(3)
    assert told[1:] == [NodeLoad(generated_tokens=1, num_edges=1, num_own=1)] * 3


def test_slow_edge_worker_receives_the_failure_of_its_request(rig):
    rig.begin("a")
    rig.fall_silent()
    assert [ticket.request_id for ticket in rig.role.cancelled] == ["a"]
    while isinstance(answer := rig.answer(), TokenBatch | Pong):
        pass
    assert (answer.request_id, answer.error.code) == ("a", "peer_lost")
    assert answer.error.is_retryable


def test_long_step_does_not_lose_edge_workers_that_pinged_meanwhile(rig):
    rig.begin("a")
    rig.send(Ping())
    wait([rig.inbox], PATIENCE_S)
    rig.fall_silent()
    assert not rig.role.cancelled


def test_exception_in_a_pass_fails_its_requests_but_not_the_loop(rig):
    rig.role.is_talking = False
    rig.begin("a")
    rig.role.bug = ZeroDivisionError("a bug")
    rig.loop.run_once(0)
    assert [type(error) for error in rig.role.failures] == [EngineFailed]
    rig.role.bug = None
    rig.clock.now_s += PROBE_INTERVAL_S
    rig.loop.run_once(0)
    assert rig.answer() == Pong(epoch=EPOCH, load=NodeLoad(num_running=1, num_edges=1, num_own=1))
    assert not rig.role.cancelled


@pytest.mark.parametrize("broken", ["load", "log_line", "flush_cache"])
def test_exception_in_a_report_or_a_flush_fails_no_request(rig, broken):
    rig.role.is_talking = False
    rig.begin("a")
    setattr(rig.role, broken, bug)
    rig.loop._log_interval_s = 0
    rig.send(FlushCache())
    rig.send(Ping())
    # Without answers the edge worker would count the node as lost.
    rig.pass_until(lambda: isinstance(rig.link.receive(), Pong))
    assert rig.role.failures == []
    assert rig.role.started


@pytest.mark.parametrize("broken", ["load", "hand_over"])
def test_exception_in_a_drain_fails_no_request(rig, broken):
    rig.role.is_talking = False
    rig.begin("a")
    setattr(rig.role, broken, bug)
    rig.loop.order(DrainOrder(number=1, timeout_s=0))
    rig.loop.run_once(0)
    assert rig.role.failures == []
    assert bool(rig.role.started) == (broken == "hand_over")


def test_answer_that_cannot_be_sent_fails_only_its_own_request(rig):
    rig.role.is_talking = False
    rig.begin("a", "b")
    broken, whole = rig.role.started
    rig.role.answers.token(broken, 1 << 70, [5], Finish(reason="length"))  # no 64-bit integer
    rig.role.answers.token(whole, 0, [5], Finish(reason="length"))
    rig.loop.run_once(0)
    assert [ticket.request_id for ticket in rig.role.cancelled] == ["a"]
    told = {type(answer): answer for answer in rig.answers(2)}
    assert told[RequestFailed].request_id == "a"
    assert told[RequestFailed].error.code == EngineFailed.code
    assert [delta.request_id for delta in told[TokenBatch].deltas] == ["b"]
    assert rig.role.failures == []


def test_lost_device_ends_the_loop_and_fails_no_request(rig):
    """Edge workers detect that the process is gone, and retry the requests elsewhere."""
    rig.begin("a")
    rig.role.bug = DeviceLost("cuda:0: CUDA error")
    with pytest.raises(DeviceLost):
        rig.loop.run_once(0)
    assert rig.role.failures == []


def test_answer_above_the_message_limit_fails_only_its_own_request(rig):
    rig.role.is_talking = False
    rig.begin("a", "b")
    large, small = rig.role.started
    entries = [TokenLogprobs(logprob=-1.0, top=[(7, -1.0)] * 1000)] * 2000
    rig.role.answers.prompt_logprobs(large, 1, entries, 0)
    rig.role.answers.token(small, 0, [5], Finish(reason="length"))
    rig.loop.run_once(0)
    assert [ticket.request_id for ticket in rig.role.cancelled] == ["a"]
    answers = rig.answers(2)
    told = {type(answer): answer for answer in answers}
    assert told[RequestFailed].request_id == "a"
    assert told[RequestFailed].error.code == InvalidRequest.code
    assert [delta.request_id for delta in told[TokenBatch].deltas] == ["b"]


def test_exception_in_a_message_is_answered_and_the_loop_continues(rig):
    rig.role.refusal = ZeroDivisionError()
    rig.send(start("a"))
    rig.pass_until(lambda: rig.link.socket.poll(0))
    answer = rig.answer()
    assert isinstance(answer, RequestFailed)
    assert (answer.request_id, answer.error.code) == ("a", EngineFailed.code)
    rig.role.refusal = None
    rig.send(start("b"))
    rig.pass_until(lambda: [ticket.request_id for ticket in rig.role.started] == ["b"])


def test_invalid_frames_are_counted_in_the_load(rig):
    rig.send(Ping())
    rig.pass_until(lambda: rig.link.socket.poll(0))
    assert rig.answer().load.num_invalid == 0
    rig.link.socket.send(b"\xc1")
    rig.send(Ping())
    rig.pass_until(lambda: (said := rig.link.receive()) and said.load.num_invalid == 1)


def failure(rig) -> RequestFailed:
    for _ in patiently():
        rig.loop.run_once(0.01)
        if isinstance(answer := rig.link.receive(), RequestFailed):
            return answer
    raise AssertionError("no failure")


def test_drain_rejects_new_requests_and_finishes_running_ones(rig):
    rig.begin("a")
    rig.loop.order(DrainOrder(number=1, timeout_s=30))
    rig.send(start("b"))
    refused = failure(rig)
    assert (refused.request_id, refused.error.code) == ("b", "node_draining")
    assert refused.error.is_retryable
    assert (len(rig.role.started), rig.drained) == (1, [])
    rig.role.started.clear()
    rig.role.has_work = False
    rig.loop.run_once(0)
    assert rig.drained == [], "the edge worker may not have read its answers"
    for _ in range(2):
        rig.send(Ping())
    rig.pass_until(lambda: rig.drained)
    rig.loop.run_once(0)
    assert rig.drained == [1]


def test_drain_does_not_wait_for_a_silent_edge_worker(rig):
    rig.begin("a")
    rig.role.has_work = False
    rig.loop.order(DrainOrder(number=1, timeout_s=0))
    rig.fall_silent()
    rig.loop.run_once(0)
    assert rig.drained == [1]


def test_requests_unfinished_at_the_deadline_are_handed_over(rig):
    rig.begin("a")
    rig.role.is_talking = False
    rig.loop.order(DrainOrder(number=1, timeout_s=30))
    rig.loop.run_once(0)
    rig.send(Ping())  # otherwise the edge worker would be lost, and nothing handed over
    wait([rig.inbox], PATIENCE_S)
    rig.clock.now_s += 29
    rig.loop.run_once(0)
    assert rig.role.started
    rig.clock.now_s += 1.5
    rig.loop.run_once(0)
    handed_over = failure(rig)
    assert (handed_over.request_id, handed_over.error.code) == ("a", "node_draining")
    assert handed_over.error.is_retryable
    assert not rig.role.started


def test_drain_waits_for_pages_that_are_still_written(rig):
    rig.loop.order(DrainOrder(number=1, timeout_s=0))
    rig.loop.run_once(0)
    assert rig.drained == [], "the engine still computes"
    rig.role.has_work = False
    rig.role.load = lambda: NodeLoad(num_transferring=1)
    rig.loop.run_once(0)
    assert rig.drained == []
    rig.role.load = NodeLoad
    rig.loop.run_once(0)
    assert rig.drained == [1]


def test_resumed_node_accepts_requests_again(rig):
    rig.loop.order(DrainOrder(number=1, timeout_s=0))
    rig.loop.order(Resume())
    rig.begin("a")


def test_measurements_are_sent_only_on_request(rig):
    rig.send(Ping())
    rig.send(Ping(wants_measures=True))
    told = rig.answers(3)
    assert [type(message) for message in told] == [Pong, Pong, Measured]
    assert told[-1].pid == os.getpid()
