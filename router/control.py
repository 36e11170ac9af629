"""What the parent process and its edge workers tell each other, as lines of JSON over one socket pair each.

```
 parent ──▶ worker     WorkerStart · NewMembers · Leave · Ask · Answers · end of input: stop
 worker ──▶ parent     Status · NodesUp · Ask · Reply
```

One edge worker reaches the others through the parent: its `Ask` is sent on to each, their `Reply`s become one
`Answers`. A worker that does not reply within `TIMEOUT_S` is named as silent.
"""

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Generic, Literal, TypeVar

import msgspec
from typing_extensions import override

from tandem.router.config import RouterConfig
from tandem.router.membership import Announcement, Members
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ErrorInfo, TandemError, error_from_info

log = get_logger(__name__)

# A worker that serves replies in milliseconds; a person who asks would rather know of one that is stuck.
TIMEOUT_S = 0.5
# The parent has little to do: one that does not answer for so long is stopped.
PARENT_TIMEOUT_S = 5.0
# Of a line: an overview with 200 requests has some 300 KB.
LINE_LIMIT_BYTES = 16 << 20

Kind = Literal["abort", "info", "nodes", "overview", "workers", "announce"]

T = TypeVar("T")


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first line that a worker is sent.

    Attributes:
        index: 0 ... num_workers - 1.
        socket_fd: The inherited socket: the listening one of an only worker, else a door (`doorman.py`).
        metrics_directory: Where prometheus_client keeps what all workers count; empty for an only worker.
    """

    config: RouterConfig
    index: int
    socket_fd: int
    members: Members
    metrics_directory: str = ""


class NewMembers(_Message, frozen=True, kw_only=True):
    """Use these nodes from here on."""

    members: Members


class Leave(_Message, frozen=True, kw_only=True):
    """The router is about to end: `/health` is 503, and everything is still served."""


class Ask(_Message, frozen=True, kw_only=True):
    """A worker asks all others, or has a node announced; sent on, each of the others is asked."""

    number: int
    kind: Kind
    body: str = ""


class Reply(_Message, frozen=True, kw_only=True):
    """One worker's reply, as JSON."""

    number: int
    body: str


class Status(_Message, frozen=True, kw_only=True):
    """One worker at one moment.

    Attributes:
        is_open: It takes connections.
        is_serving: It has met a prefill and a decode that can serve.
        num_received: Connections that it ever took.
        num_closed: How many of them are closed. With what the parent handed over, this one number
            says how many a worker has, however late it arrives.
        num_streams: Generations running now.
        pid: Of its process; 0 while there is none.
    """

    is_open: bool = False
    is_serving: bool = False
    num_received: int = 0
    num_closed: int = 0
    num_streams: int = 0
    pid: int = 0

    @property
    def num_connections(self) -> int:
        """Connections open now, busy or idle."""
        return self.num_received - self.num_closed


class Answers(_Message, frozen=True, kw_only=True):
    """What the other workers replied.

    Attributes:
        given: The JSON of those that replied.
        silent: The indices of the others.
        workers: The last status of every worker.
        error: Why the parent did not do what it was asked.
    """

    number: int
    given: list[str] = []
    silent: list[int] = []
    workers: list[Status] = []
    error: ErrorInfo | None = None


class NodesUp(_Message, frozen=True, kw_only=True):
    """The nodes that this worker can use now."""

    urls: list[str]


ToWorker = NewMembers | Leave | Ask | Answers
ToParent = Status | NodesUp | Ask | Reply
TO_WORKER: msgspec.json.Decoder[ToWorker] = msgspec.json.Decoder(ToWorker)
TO_PARENT: msgspec.json.Decoder[ToParent] = msgspec.json.Decoder(ToParent)


def line(message: msgspec.Struct) -> bytes:
    """Return a message as it is sent."""
    return msgspec.json.encode(message) + b"\n"


async def opened(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return the streams of one end of the pair."""
    return await asyncio.open_unix_connection(sock=sock, limit=LINE_LIMIT_BYTES)


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield lines until the far side ends. The last one of a process that was killed may be cut off."""
    try:
        while (received := await reader.readline()).endswith(b"\n"):
            yield received
    except ConnectionError:
        return
    except ValueError:  # a line beyond the limit: only this link ends
        log.exception("edge_worker.line_too_long", limit_bytes=LINE_LIMIT_BYTES)


class _Questions(Generic[T]):
    """Answers that are waited for, by the numbers of their questions."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[T]] = {}

    async def answer(self, send: Callable[[int], None], timeout_s: float) -> T:
        """Send a question under a number of its own and return what `take` is given for it.

        Raises:
            TimeoutError: Nothing came in time.
        """
        number = next(self._numbers)
        asked: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._asked[number] = asked
        try:
            send(number)
            async with asyncio.timeout(timeout_s):
                return await asked
        finally:
            del self._asked[number]

    def take(self, number: int, answer: T) -> None:
        """Take an answer; one that nobody waits for any more is dropped."""
        asked = self._asked.get(number)
        if asked is not None and not asked.done():
            asked.set_result(answer)


class ParentLink:
    """A worker's end.

    Args:
        reader, writer: As `opened` returns them.

    Attributes:
        replies: By kind, what answers a question; returns the JSON.
        is_stopped: Set when the parent has ended its side: this worker is to stop.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.replies: Mapping[Kind, Callable[[str], Awaitable[bytes]]] = {}
        self._reader, self._writer = reader, writer
        self._questions = _Questions[Answers]()
        self.is_stopped = asyncio.Event()

    async def run(self, apply: Callable[[Members], None], leave: Callable[[], None]) -> None:
        """Take what the parent sends until it ends its side; reply to questions meanwhile."""
        try:
            async with asyncio.TaskGroup() as tasks:
                async for received in _lines(self._reader):
                    match TO_WORKER.decode(received):
                        case NewMembers(members=members):
                            apply(members)
                        case Leave():
                            leave()
                        case Ask() as question:
                            tasks.create_task(self._reply(question))
                        case Answers() as answers:
                            self._questions.take(answers.number, answers)
                leave()
                self.is_stopped.set()
        finally:
            self._writer.close()

    def send(self, message: ToParent) -> None:
        """Send a message; one after the parent's end is dropped."""
        if not self._writer.is_closing():
            self._writer.write(line(message))

    async def announce(self, announcement: Announcement) -> None:
        """Have the parent take an announcement; it holds for all workers when this returns.

        Raises:
            TandemError: The parent does not take it, or does not answer.
        """
        body = msgspec.json.encode(announcement).decode()
        try:
            answers = await self._ask("announce", body, PARENT_TIMEOUT_S)
        except TimeoutError as error:
            raise TandemError("the router's parent process does not answer") from error
        if answers.error is not None:
            raise error_from_info(answers.error)

    async def ask(self, kind: Kind, body: str = "") -> Answers:
        """Ask all other workers; a parent that does not answer leaves the answers empty."""
        try:
            return await self._ask(kind, body, 2 * TIMEOUT_S)
        except TimeoutError:
            return Answers(number=0)

    async def _ask(self, kind: Kind, body: str, timeout_s: float) -> Answers:
        return await self._questions.answer(
            lambda number: self.send(Ask(number=number, kind=kind, body=body)), timeout_s
        )

    async def _reply(self, question: Ask) -> None:
        try:
            body = await self.replies[question.kind](question.body)
        except Exception:  # the top of a reply: this worker serves on, and counts as silent
            log.exception("question.failed", kind=question.kind)
            return
        self.send(Reply(number=question.number, body=body.decode()))


class WorkerLink:
    """The parent's end of one worker, over all of its lives.

    Attributes:
        status: As its worker last sent it.
        up: The URLs of nodes that it can use.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.status, self.up = Status(), frozenset[str]()
        self._writer: asyncio.StreamWriter | None = None
        self._is_stopped = False
        self._questions = _Questions[str]()

    @override
    def __repr__(self) -> str:
        return f"<WorkerLink {self.index} {self.status}>"

    async def run(
        self,
        sock: socket.socket,
        start: WorkerStart,
        answer: "Callable[[WorkerLink, Ask], Coroutine[None, None, None]]",
        linked: "Callable[[WorkerLink], None]",
    ) -> None:
        """Start a life of the worker and take what it sends until it ends.

        Args:
            answer: Answers what it asks.
            linked: Called once it can be sent messages.
        """
        reader, self._writer = await opened(sock)
        self._is_stopped = False
        self._writer.write(line(start))
        linked(self)
        try:
            async with asyncio.TaskGroup() as tasks:
                async for received in _lines(reader):
                    match TO_PARENT.decode(received):
                        case Status() as status:
                            self.status = status
                        case NodesUp(urls=urls):
                            self.up = frozenset(urls)
                        case Reply(number=number, body=body):
                            self._questions.take(number, body)
                        case Ask() as asked:
                            tasks.create_task(answer(self, asked))
        finally:
            self._writer.close()
            self._writer, self.status, self.up = None, Status(), frozenset()

    def send(self, message: ToWorker) -> None:
        """Send a message; a worker that is not there, or is to stop, misses it."""
        if self._writer is not None and not self._is_stopped and not self._writer.is_closing():
            self._writer.write(line(message))

    def stop(self) -> None:
        """End the input of the worker: it is to stop. Safe to call twice."""
        if self._writer is not None and not self._is_stopped and not self._writer.is_closing():
            self._is_stopped = True
            self._writer.write_eof()

    async def ask(self, kind: Kind, body: str) -> str | None:
        """Return the worker's reply as JSON; None when there is none in time."""
        if self._writer is None:
            return None
        try:
            return await self._questions.answer(
                lambda number: self.send(Ask(number=number, kind=kind, body=body)), TIMEOUT_S
            )
        except TimeoutError:
            return None


def started(stdin: int) -> WorkerStart | None:
    """Read the first line of standard input, and nothing after it; None when the parent is gone."""
    with open(stdin, "rb", buffering=0, closefd=False) as parent:
        received = parent.readline()
    return msgspec.json.decode(received, type=WorkerStart) if received else None


def socket_of(stdin: int) -> socket.socket:
    """Return standard input as the socket that it is."""
    return socket.socket(fileno=os.dup(stdin))
