"""The engine loop with a role that only records, over the real wire."""

import os

import pytest

from tandem.engine.errors import DeviceLost
from tandem.node.answers import Answers, Ticket
from tandem.node.engine_process import Drain, Resume
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
    CacheReport,
    Cancel,
    FromEngine,
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
from tests.patience import PATIENCE_S, patiently

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

    def load(self):
        return NodeLoad(num_running=len(self.started))

    def log_line(self, elapsed_s):
        return None


class SlowInbox(Inbox[ToEngine]):
    """An inbox whose peers read only when a test says so."""

    is_read = True

    def send(self, peer, message) -> None:
        if not self.is_read:
            raise PeerBehind("it does not read")
        super().send(peer, message)


class Rig:
    """A loop, one edge worker's link and a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0
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
            clock=lambda: self.now,
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
        """Start requests, and have them reach the role."""
        for name in names:
            self.send(start(name))
        self.pass_until(lambda: len(self.role.started) == len(names))

    def fall_silent(self) -> None:
        """Let so much time pass that an edge worker is lost, and make a pass."""
        self.now += DEFAULT_HEARTBEAT.silence_s + 0.1
        self.loop.run_once(0)

    def pass_until(self, is_done) -> None:
        for _ in patiently():
            self.loop.run_once(0.01)
            if is_done():
                return
        raise AssertionError("it did not come")

    def answer(self):
        for _ in patiently():
            if (message := self.link.receive()) is not None:
                return message
            wait([self.link], 0.01)
        raise AssertionError("no answer")

    def answers(self, num: int) -> list:
        """Return the next answers to questions of which one pass may find only the first."""
        told = []

        def is_told() -> bool:
            while len(told) < num and (message := self.link.receive()) is not None:
                told.append(message)
            return len(told) == num

        self.pass_until(is_told)
        return told

    def lose_edge(self) -> None:
        """End the edge worker's link, as the kernel does for a process that was killed."""
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
    """An inbox that keeps what it is given to send."""

    def __init__(self) -> None:
        self.sent = []
        self.is_read = True

    def send(self, peer, message) -> None:
        if not self.is_read:
            raise PeerBehind("it does not read")
        self.sent.append(message)


def test_an_edge_worker_that_did_not_read_hears_of_each_failure_once_it_does():
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


def test_ordinary_tokens_are_columns_and_what_follows_a_delta_is_one():
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


def test_a_ping_is_answered_with_the_load_and_with_what_changed_in_caches_since_it_asked(rig):
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


def test_a_second_start_of_one_id_takes_the_place_of_the_first(rig):
    rig.send(start("a"))
    rig.send(start("a"))
    rig.pass_until(lambda: rig.role.cancelled)
    assert rig.role.started == rig.role.cancelled


def test_a_refused_request_is_answered(rig):
    rig.role.refusal = Overloaded("full")
    rig.send(start("a"))
    rig.pass_until(lambda: rig.link.socket.poll(0))
    answer = rig.answer()
    assert isinstance(answer, RequestFailed)
    assert (answer.request_id, answer.error.status) == ("a", 429)


def test_a_cancel_reaches_the_role(rig):
    rig.begin("a")
    rig.send(Cancel(request_id=RequestId("a")))
    rig.pass_until(lambda: rig.role.cancelled)


@pytest.mark.parametrize("is_talking", [True, False])
def test_requests_of_an_edge_that_is_gone_are_cancelled_and_it_is_counted_once(rig, is_talking):
    rig.role.is_talking = is_talking
    rig.begin("a")
    rig.loop.order(Drain(number=1, timeout_s=60))
    rig.lose_edge()
    rig.role.has_work = is_talking
    for _ in range(10):
        rig.now += PROBE_INTERVAL_S
        rig.loop.run_once(0)
    assert [ticket.request_id for ticket in rig.role.cancelled] == ["a"]
    assert rig.measures.num_lost_edges == 1
    rig.role.has_work = False
    rig.pass_until(lambda: rig.drained)  # which waits for nobody


def test_an_edge_that_stops_reading_is_counted_once_and_hears_of_its_failure_later(rig):
    rig.begin("a")
    rig.inbox.is_read = False
    for _ in range(10):
        rig.loop.run_once(0)
    assert rig.role.cancelled
    assert rig.measures.num_lost_edges == 1
    rig.inbox.is_read = True
    assert failure(rig).error.code == PeerLost.code


def test_an_edge_with_requests_is_told_the_load_five_times_a_second_and_another_only_of_changes(
    rig,
):
    told: list[NodeLoad] = []

    def probe(num_times: int) -> None:
        """Keep what is sent in so many passes: what is not sent would only be waited for."""
        for _ in range(num_times):
            rig.now += PROBE_INTERVAL_S
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


def test_an_edge_that_was_only_slow_hears_that_its_request_ended(rig):
    rig.begin("a")
    rig.fall_silent()
    assert [ticket.request_id for ticket in rig.role.cancelled] == ["a"]
    while isinstance(answer := rig.answer(), TokenBatch | Pong):
        pass
    assert (answer.request_id, answer.error.code) == ("a", "peer_lost")
    assert answer.error.is_retryable


def test_a_step_longer_than_the_limit_silences_nobody_who_pinged_meanwhile(rig):
    rig.begin("a")
    rig.send(Ping())
    wait([rig.inbox], PATIENCE_S)
    rig.fall_silent()
    assert not rig.role.cancelled


def test_a_bug_in_a_pass_fails_its_requests_and_not_the_loop(rig):
    rig.role.is_talking = False
    rig.begin("a")
    rig.role.bug, rig.role.load = ZeroDivisionError("a bug"), bug
    rig.now += PROBE_INTERVAL_S
    rig.loop.run_once(0)
    assert [type(error) for error in rig.role.failures] == [EngineFailed] * 2
    rig.role.bug = None
    del rig.role.load
    rig.now += PROBE_INTERVAL_S
    rig.loop.run_once(0)
    assert rig.answer() == Pong(epoch=EPOCH, load=NodeLoad(num_running=1, num_edges=1, num_own=1))
    assert not rig.role.cancelled


def test_a_lost_device_ends_the_loop_and_fails_no_request(rig):
    """Its edge workers find the process gone, and begin the requests elsewhere."""
    rig.begin("a")
    rig.role.bug = DeviceLost("cuda:0: CUDA error")
    with pytest.raises(DeviceLost):
        rig.loop.run_once(0)
    assert rig.role.failures == []


def test_an_answer_that_is_too_large_for_a_message_ends_its_own_request_alone(rig):
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


def test_a_bug_that_one_message_finds_is_answered_and_the_loop_goes_on(rig):
    rig.role.refusal = ZeroDivisionError()
    rig.send(start("a"))
    rig.pass_until(lambda: rig.link.socket.poll(0))
    answer = rig.answer()
    assert isinstance(answer, RequestFailed)
    assert (answer.request_id, answer.error.code) == ("a", EngineFailed.code)
    rig.role.refusal = None
    rig.send(start("b"))
    rig.pass_until(lambda: [ticket.request_id for ticket in rig.role.started] == ["b"])


def test_frames_that_are_no_message_show_in_the_load(rig):
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


def test_a_drain_refuses_what_comes_and_lets_what_is_in_finish(rig):
    rig.begin("a")
    rig.loop.order(Drain(number=1, timeout_s=30))
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


def test_an_edge_worker_that_fell_silent_is_waited_for_by_no_drain(rig):
    rig.begin("a")
    rig.role.has_work = False
    rig.loop.order(Drain(number=1, timeout_s=0))
    rig.fall_silent()
    rig.loop.run_once(0)
    assert rig.drained == [1]


def test_what_is_not_finished_by_the_deadline_is_handed_over(rig):
    rig.begin("a")
    rig.role.is_talking = False
    rig.loop.order(Drain(number=1, timeout_s=30))
    rig.loop.run_once(0)
    rig.send(Ping())  # else the edge worker is lost, which hands nothing over
    wait([rig.inbox], PATIENCE_S)
    rig.now += 29
    rig.loop.run_once(0)
    assert rig.role.started
    rig.now += 1.5
    rig.loop.run_once(0)
    handed_over = failure(rig)
    assert (handed_over.request_id, handed_over.error.code) == ("a", "node_draining")
    assert handed_over.error.is_retryable
    assert not rig.role.started


def test_pages_that_are_still_written_keep_a_drain_from_being_over(rig):
    rig.loop.order(Drain(number=1, timeout_s=0))
    rig.loop.run_once(0)
    assert rig.drained == [], "the engine still computes"
    rig.role.has_work = False
    rig.role.load = lambda: NodeLoad(num_transferring=1)
    rig.loop.run_once(0)
    assert rig.drained == []
    rig.role.load = NodeLoad
    rig.loop.run_once(0)
    assert rig.drained == [1]


def test_a_drain_that_was_ended_takes_requests_again(rig):
    rig.loop.order(Drain(number=1, timeout_s=0))
    rig.loop.order(Resume())
    rig.begin("a")


def test_who_pings_for_measures_is_told_them_and_others_are_not(rig):
    rig.send(Ping())
    rig.send(Ping(wants_measures=True))
    told = rig.answers(3)
    assert [type(message) for message in told] == [Pong, Pong, Measured]
    assert told[-1].pid == os.getpid()
