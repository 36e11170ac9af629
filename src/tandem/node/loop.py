"""The loop of the engine process: drain the inbox, poll the role, step, send answers.

The loop is single-threaded; threads for transfers and tiers set its waker. It tracks which edge worker sent which
request (`Ticket`). An edge worker is lost when its connection breaks or times out. The role processes the requests.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection

import msgspec

from tandem.node.answers import Answers, Ticket
from tandem.node.life.engine_process import DrainOrder, Order
from tandem.node.life.life import EngineDrain, hand_over, num_left, refusal
from tandem.node.metrics import Measures
from tandem.node.role import RequestRunner, Start
from tandem.telemetry.log import get_logger
from tandem.wire.channel import DEFAULT_HEARTBEAT, Heartbeat, Inbox, Peer, Waker, wait
from tandem.wire.errors import EngineFailed, PeerLost, TandemError
from tandem.wire.messages import (
    Cancel,
    ChangeAdapter,
    FlushCache,
    LoadAdapter,
    NodeLoad,
    Ping,
    StartColocated,
    StartDecode,
    StartPrefill,
    ToEngine,
    UnloadAdapter,
)

log = get_logger(__name__)

# Maximum wait of an idle loop, so that it detects lost edge workers without receiving a message.
IDLE_WAIT_S = 0.25
# Interval of load reports. Shorter than `IDLE_WAIT_S`, so that an idle loop reports on every pass.
PROBE_INTERVAL_S = 0.2


class EngineLoop:
    """Runs a role until `stop`.

    Args:
        heartbeat: Defines the silence after which an edge worker counts as lost.
        log_interval_s: Interval between two lines of `RequestRunner.log_line`.
        measures: Counts and times of this process, for operators.
        on_drained: Called with the number of a drain when no request is left and all answers have been read.
        wait_s: Returns the time that an idle loop may wait, in seconds; its argument is the upper limit.
        on_pass: Called at the start of each pass of `run`.
    """

    def __init__(
        self,
        role: RequestRunner,
        inbox: Inbox[ToEngine],
        answers: Answers,
        waker: Waker,
        *,
        heartbeat: Heartbeat = DEFAULT_HEARTBEAT,
        clock: Callable[[], float] = time.monotonic,
        log_interval_s: float = 5.0,
        measures: Measures | None = None,
        on_drained: Callable[[int], None] = lambda _number: None,
        wait_s: Callable[[float], float] = lambda at_most_s: at_most_s,
        on_pass: Callable[[], None] = lambda: None,
    ) -> None:
        self._role = role
        self._inbox = inbox
        self._answers = answers
        self._waker = waker
        self._heartbeat, self._clock = heartbeat, clock
        self._log_interval_s = log_interval_s
        self._measures = measures or Measures()
        self._logged_at = clock()
        self._probed_at = clock()
        self._received_s: dict[Peer, float] = {}
        self._last_load = NodeLoad()
        self._sent_loads: dict[Peer, NodeLoad] = {}
        self._is_stopping = False
        self._orders: deque[Order] = deque()
        self._drain = EngineDrain()
        self._on_drained, self._wait_s, self._on_pass = on_drained, wait_s, on_pass

    def stop(self) -> None:
        """End `run` after the current pass. Any thread may call it."""
        self._is_stopping = True
        self._waker.wake()

    def order(self, order: Order) -> None:
        """Queue an order to drain or resume for the next pass. Any thread may call it."""
        self._orders.append(order)
        self._waker.wake()

    def run(self) -> None:
        """Loop until `stop`.

        `DeviceLost` propagates without failing any request: no step can succeed, and edge workers retry elsewhere.
        """
        while not self._is_stopping:
            self._on_pass()
            self.run_once(0.0 if self._role.has_work else self._wait_s(IDLE_WAIT_S))

    def run_once(self, timeout_s: float) -> None:
        """Make one pass; wait at most `timeout_s` for a message or the waker.

        An exception ends the part of the pass that raised it. Requests fail only if it was their step.
        """
        wait([self._inbox], timeout_s, self._waker)
        self._measures.begin_pass(is_busy=not timeout_s)
        for part in (
            self._take_orders,
            self._listen,
            self._probe,
            self._drop_lost_edges,
            self._hand_over,
            self._work,
            self._flush,
            self._report_drained,
            self._log,
        ):
            try:
                part()
            except Exception:
                log.exception("engine.pass_failed", part=part.__name__.strip("_"))

    def _listen(self) -> None:
        for envelope in self._inbox.queued():
            self._received_s[envelope.peer] = self._clock()
            self._receive(envelope.peer, envelope.message)

    def _hand_over(self) -> None:
        # All tokens of the previous pass have been sent, so the node that takes over does not recompute them.
        if self._drain.take_hand_over(self._clock()):
            self._role.hand_over(hand_over())

    def _work(self) -> None:
        try:
            self._role.poll()
            if self._role.has_work:
                with self._measures.step():
                    self._role.step()
        except Exception:
            # It is unknown which request broke the step, so all fail; the node continues.
            log.exception("engine.step_failed")
            self._role.fail_all(EngineFailed("the engine failed while it ran this request"))

    def _flush(self) -> None:
        for ticket in self._answers.flush():
            self._role.cancel(ticket)

    def _receive(self, peer: Peer, message: ToEngine) -> None:
        try:
            self._handle(peer, message)
        except Exception:
            # A bad message of one peer must not end other peers' requests.
            log.exception("engine.message_failed", kind=type(message).__name__)
            if isinstance(message, StartPrefill | StartDecode | StartColocated):
                ticket = Ticket(peer, message.request.request_id, message.attempt)
                self._role.cancel(ticket)
                self._answers.fail(ticket, EngineFailed("the engine failed to accept this request"))

    def _take_orders(self) -> None:
        while self._orders:
            order = self._orders.popleft()
            if isinstance(order, DrainOrder):
                self._drain.begin(order.number, order.timeout_s, self._clock())
                log.info("engine.draining", num_left=num_left(self._role.load()))
            else:
                self._drain.end()
                log.info("engine.resumed")

    def _report_drained(self) -> None:
        if self._drain.is_on and not self._role.has_work:
            left, is_read = num_left(self._role.load()), self._answers.are_read
            number = self._drain.take_end(left, self._clock(), is_read=is_read)
            if number is not None:
                self._on_drained(number)

    def _handle(self, peer: Peer, message: ToEngine) -> None:
        if isinstance(message, Ping):
            self._answers.on_ping(peer)
            self._send_load([peer])
            self._answers.prefixes(peer, message.prefix_position)
            self._answers.tiers(peer, message.tier_positions)
            if message.wants_measures:
                self._answers.measured(peer, self._measures.report)
        elif isinstance(message, FlushCache):
            self._role.flush_cache()
            self._send_load([peer])
        elif isinstance(message, LoadAdapter | UnloadAdapter):
            self._change_adapter(peer, message)
        elif isinstance(message, Cancel):
            self._role.cancel(Ticket(peer, message.request_id, message.attempt))
        else:
            ticket = Ticket(peer, message.request.request_id, message.attempt, message.stream)
            self._start(ticket, message)

    def _change_adapter(self, peer: Peer, change: ChangeAdapter) -> None:
        def answer(result: str | TandemError) -> None:
            self._send_load(self._received_s, is_repeated=False)
            self._answers.adapter_changed(peer, change.number, result)

        try:
            self._role.change_adapter(change, answer)
        except TandemError as error:
            answer(error)

    def _start(self, ticket: Ticket, message: Start) -> None:
        # An edge worker reuses an id only after dropping the earlier request.
        self._role.cancel(ticket)
        try:
            if self._drain.is_on:
                raise refusal()
            self._role.start(ticket, message)
        except TandemError as error:
            self._measures.count_refused(error)
            log.info("request.refused", request_id=ticket.request_id, reason=error.message)
            self._answers.fail(ticket, error)

    def _drop_lost_edges(self) -> None:
        # Each peer's next message was just read, so a step longer than the limit does not make a live peer count as lost.
        limit = self._clock() - self._heartbeat.silence_s
        silent = {peer for peer, received_s in self._received_s.items() if received_s < limit}
        for peer in silent | self._answers.take_unreachable():
            self._sent_loads.pop(peer, None)
            # Later sends to a lost edge worker fail too; count the loss once.
            if self._received_s.pop(peer, None) is not None:
                self._measures.num_lost_edges += 1
            tickets = [ticket for ticket in self._role.tickets() if ticket.peer == peer]
            if tickets:
                log.info("edge.lost", peer=peer.hex(), num_requests=len(tickets))
            for ticket in tickets:
                self._role.cancel(ticket)
                # An edge worker that was only slow reads this failure and starts a new attempt.
                self._answers.fail(ticket, PeerLost("the edge worker was silent for too long"))
            self._answers.on_lost(peer)

    def _probe(self) -> None:
        """Send the load to every edge worker; a failed send also detects killed edge workers.

        Edge workers without requests here receive only changes, because they may serve hundreds of nodes.
        """
        now = self._clock()
        if now - self._probed_at >= PROBE_INTERVAL_S:
            self._probed_at = now
            self._send_load(self._received_s, is_repeated=False)

    def _send_load(self, peers: Collection[Peer], *, is_repeated: bool = True) -> None:
        """Send the load to edge workers, each with its own number of requests.

        Args:
            is_repeated: Whether to send an unchanged load to an edge worker without requests here.
        """
        counts = Counter(ticket.peer for ticket in self._role.tickets())
        load = msgspec.structs.replace(
            self._load(), num_edges=len(counts), is_draining=self._drain.is_on
        )
        for peer in peers:
            own = msgspec.structs.replace(load, num_own=counts[peer])
            if is_repeated or counts[peer] or own != self._sent_loads.get(peer):
                self._sent_loads[peer] = own
                self._answers.pong(peer, own)

    def _load(self) -> NodeLoad:
        """Return the role's load with the inbox's counts of rejected connections and frames.

        If the load cannot be determined, return the last one: an edge worker without answers would drop its requests.
        """
        try:
            load = self._last_load = self._role.load()
        except Exception:
            log.exception("engine.load_failed")
            load = self._last_load
        return msgspec.structs.replace(
            load,
            num_strangers=load.num_strangers + self._inbox.num_strangers,
            num_invalid=self._inbox.num_invalid,
        )

    def _log(self) -> None:
        elapsed_s = self._clock() - self._logged_at
        if elapsed_s >= self._log_interval_s:
            self._logged_at = self._clock()
            line = self._role.log_line(elapsed_s)
            if line is not None:
                log.info(line)
