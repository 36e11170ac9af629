"""Hosts and the connections between them: frames arrive late and in order, until a connection breaks.

What may happen to a connection is what happens to TCP: nothing in it is lost, repeated or overtaken,
and it ends. Each end learns of the end by itself: at once when it was reset, after 2 to 2.5 s when
heartbeats stay out. While a path is cut its frames wait, and come when it heals in time.
"""

from tandem.wire.channel import DEFAULT_HEARTBEAT, Peer
from tandem.wire.errors import PeerLost

CLIENT, SERVER = 0, 1
# ZMTP asks every half second, so silence is noticed so much later at most.
NOTICE_S = (
    DEFAULT_HEARTBEAT.timeout_s,
    DEFAULT_HEARTBEAT.timeout_s + DEFAULT_HEARTBEAT.interval_s,
)


class Connection:
    """One connection between a client's end and an inbox.

    An end has `process`, `put(frame, connection)` and `closed(connection)`.
    """

    def __init__(self, network, client, inbox) -> None:
        self.network = network
        self.ends = (client, inbox)
        self.peer = Peer(network.world.draw.randbytes(5))
        self.is_open = [True, True]
        self._last_due_s = [0.0, 0.0]
        self._held = ([], [])
        for end in self.ends:
            end.process.connections.append(self)

    @property
    def hosts(self) -> tuple[str, str]:
        """Of the client and of the inbox."""
        return self.ends[CLIENT].process.host, self.ends[SERVER].process.host

    @property
    def is_cut(self) -> bool:
        """Whether frames wait."""
        return self.network.is_cut(*self.hosts)

    def send(self, sender: int, frame: bytes, name: str) -> None:
        """Put a frame on its way.

        Raises:
            PeerLost: This end knows that the connection is over.
        """
        if not self.is_open[sender]:
            raise PeerLost("the connection is closed")
        world = self.network.world
        way = f"{self.hosts[sender]} -> {self.hosts[1 - sender]}"
        world.note("send", f"{way} {name}", name)
        if self.ends[sender].process.is_dead:  # it died while it spoke
            return
        to = 1 - sender
        due_s = max(world.loop.time() + world.delay(), self._last_due_s[to] + 1e-6)
        self._last_due_s[to] = due_s
        world.loop.call_at(due_s, self._arrive, to, (frame, f"{way} {name}", name))

    def close(self, end: int) -> None:
        """End it here; the other end hears of it, unless the path is cut."""
        if self.is_open[end]:
            self.is_open[end] = False
            self._tell_other(end)

    def notice(self, end: int, delay_s: float, unless=lambda: False) -> None:
        """Have an end learn, after a while, that it is over."""
        self.network.world.loop.call_later(delay_s, self._notice, end, unless)

    def heal(self) -> None:
        """The path is whole again: what waited comes, and an end of which only one side knows."""
        for to in (CLIENT, SERVER):
            self.network.world.loop.call_later(self.network.world.delay(), self._flush, to)
            if not self.is_open[to] and self.is_open[1 - to]:
                self.notice(1 - to, 0.001 + self.network.world.delay())

    def _tell_other(self, end: int) -> None:
        other, world = 1 - end, self.network.world
        if self.is_open[other] and not self.is_cut:
            # Behind what was sent before it.
            behind_s = max(0.0, self._last_due_s[other] - world.loop.time())
            self.notice(other, behind_s + world.delay())

    def _notice(self, end: int, unless) -> None:
        if unless() or not self.is_open[end]:
            return
        process = self.ends[end].process
        if process.is_stopped:
            process.later(0.001, lambda: self._notice(end, lambda: False))
            return
        if not process.is_dead:
            self.network.world.note("break", f"{process.host} {self.hosts}")
        self.close(end)
        self.ends[end].closed(self)

    def _arrive(self, to: int, frame) -> None:
        if self.is_cut or self._held[to]:
            self._held[to].append(frame)
        else:
            self._deliver(to, frame)

    def _flush(self, to: int) -> None:
        while self._held[to] and not self.is_cut:
            self._deliver(to, self._held[to].pop(0))

    def _deliver(self, to: int, frame) -> None:
        end, (payload, text, name) = self.ends[to], frame
        if self.is_open[to] and not end.process.is_dead:
            self.network.world.note("arrive", text, name)
            end.put(payload, self)


class Network:
    """All inboxes by address, and which paths are cut."""

    def __init__(self, world) -> None:
        self.world = world
        self._inboxes = {}
        self._cuts = {}  # hosts, to the number of the cut
        self._off = set()
        self._num_cuts = 0
        self._connections = []

    def bind(self, inbox) -> None:
        """Make an inbox reachable; one of an earlier life is forgotten."""
        self._inboxes[inbox.address] = inbox

    def is_cut(self, one: str, other: str) -> bool:
        """Whether nothing passes between two hosts now."""
        return frozenset((one, other)) in self._cuts or one in self._off or other in self._off

    def connect(self, end, address: str, first_s: float | None = None) -> None:
        """Try, over and over, until it works; then call `end.connected(connection)`."""
        wait_s = self.world.delay() if first_s is None else first_s
        end.process.later(wait_s, lambda: self._try(end, address))

    def _try(self, end, address: str) -> None:
        inbox = self._inboxes.get(address)
        is_there = (
            inbox is not None
            and not (inbox.process.is_dead or inbox.process.is_stopped)
            and not self.is_cut(end.process.host, inbox.process.host)
        )
        if end.is_closed:
            return
        if not is_there:
            self.connect(end, address, self.world.draw.uniform(0.1, 1.0))
            return
        connection = Connection(self, end, inbox)
        self._connections = [each for each in self._connections if any(each.is_open)]
        self._connections.append(connection)
        inbox.accepted(connection)
        end.connected(connection)

    def cut(self, one: str, other: str) -> None:
        """Let nothing pass between two hosts; nobody is told."""
        self._num_cuts += 1
        self._cuts[frozenset((one, other))] = self._num_cuts
        self._time_out(frozenset((one, other)), self._num_cuts)

    def heal(self, one: str, other: str) -> None:
        """End a cut."""
        if self._cuts.pop(frozenset((one, other)), None) is not None:
            for connection in self._between(one, other):
                connection.heal()

    def reset(self, one: str, other: str) -> None:
        """Break every connection between two hosts; both ends notice soon."""
        for connection in self._between(one, other):
            for end in (CLIENT, SERVER):
                connection.notice(end, self.world.delay())

    def died(self, process, *, is_silent: bool) -> None:
        """A process is gone; with its host (`is_silent`), nobody is told."""
        if is_silent:
            self._off.add(process.host)
        for connection in process.connections:
            for end in (CLIENT, SERVER):
                if connection.ends[end].process is process:
                    connection.close(end)
                    if is_silent:
                        connection.notice(1 - end, self.world.draw.uniform(*NOTICE_S))

    def back(self, host: str) -> None:
        """A host that was off is on: it knows none of its old connections."""
        self._off.discard(host)
        for connection in self._connections:
            if host in connection.hosts:
                connection.heal()

    def stopped(self, process) -> None:
        """A process stopped: its peers notice that it is silent, if it stays so."""
        process.num_stops = getattr(process, "num_stops", 0) + 1
        number = process.num_stops

        def went_on():
            return not process.is_stopped or process.num_stops != number

        for connection in process.connections:
            for end in (CLIENT, SERVER):
                if connection.ends[end].process is process:
                    delay_s = self.world.draw.uniform(*NOTICE_S)
                    connection.notice(1 - end, delay_s, went_on)

    def _between(self, one: str, other: str) -> list[Connection]:
        return [each for each in self._connections if set(each.hosts) == {one, other}]

    def _time_out(self, hosts, number: int) -> None:
        def is_healed():
            return self._cuts.get(hosts) != number

        for connection in self._between(*hosts):
            for end in (CLIENT, SERVER):
                connection.notice(end, self.world.draw.uniform(*NOTICE_S), is_healed)
