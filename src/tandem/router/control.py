"""The link between the parent process and one edge worker: lines of JSON over a socket pair.

```
 parent ──▶ worker     WorkerStart, then: members · leave · refuse · questions of other workers · end of input: stop
 worker ──▶ parent     ready · up (usable nodes) · announce · refuse (a prompt) · others (a question to all other workers)
```

Both ends are a `WorkerLink`. Messages are handled in order. Each question is answered by a `ControlReply`.
"""

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Literal

import msgspec

from tandem.router.config import RouterConfig
from tandem.router.membership.membership import Members
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ErrorInfo, TandemError, error_from_info

log = get_logger(__name__)

# A healthy worker replies within milliseconds. A short timeout shows users which worker is stuck.
TIMEOUT_S = 0.5
# The parent does little work: if it does not reply for this long, it is suspended or stuck.
PARENT_TIMEOUT_S = 5.0
# Maximum length of a line. An overview of 200 requests takes about 300 KB.
LINE_LIMIT_BYTES = 16 << 20

QuestionKind = Literal[
    "members", "leave", "abort", "overview", "status",
    "ready", "up", "announce", "refuse", "others",
]  # fmt: skip
NOTHING = msgspec.Raw(b"null")


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first line that the parent sends to a worker.

    Attributes:
        index: 0 ... num_workers - 1.
        socket_fd: File descriptor of the inherited listening socket.
        metrics_directory: Directory of the workers' shared prometheus_client counters; empty for a single worker.
        pair_wait_s: Longest wait for the first pair before the worker accepts connections.
    """

    config: RouterConfig
    index: int
    socket_fd: int
    members: Members
    metrics_directory: str = ""
    pair_wait_s: float = 0.0


class ControlMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A message or a question. A question has a number, which its `ControlReply` repeats; a message has 0."""

    kind: QuestionKind
    body: msgspec.Raw = NOTHING
    number: int = 0


class ControlReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The reply to a question."""

    number: int
    body: msgspec.Raw = NOTHING
    error: ErrorInfo | None = None


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question of one worker to all others, which the parent forwards."""

    kind: QuestionKind
    body: msgspec.Raw = NOTHING


class WorkerReplies(msgspec.Struct, frozen=True, kw_only=True):
    """The replies of the other workers, and the indexes of workers that did not reply in time (`silent`)."""

    bodies: list[msgspec.Raw] = []
    silent: list[int] = []


_DECODER: msgspec.json.Decoder[ControlMessage | ControlReply] = msgspec.json.Decoder(
    ControlMessage | ControlReply
)

MessageHandlers = Mapping[QuestionKind, Callable[[msgspec.Raw], None]]
QuestionHandlers = Mapping[QuestionKind, Callable[[msgspec.Raw], Awaitable[object]]]


class WorkerLink:
    """One end of a link.

    Attributes:
        message_handlers: Handlers of the peer's messages.
        question_handlers: Handlers of the peer's questions; their results are sent as JSON.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.message_handlers: MessageHandlers = {}
        self.question_handlers: QuestionHandlers = {}
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[ControlReply]] = {}
        self._is_ended = False

    @classmethod
    async def over(cls, sock: socket.socket) -> "WorkerLink":
        """Return a link over one socket of a pair."""
        return cls(*await asyncio.open_unix_connection(sock=sock, limit=LINE_LIMIT_BYTES))

    async def run(self) -> None:
        """Handle what the peer sends until it ends its side, then close this side.

        An invalid message closes only this link: the worker stops, and the parent restarts it.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                async for received in self._lines():
                    self._take(_DECODER.decode(received), tasks)
        except* (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, LookupError):
            log.exception("edge_worker.message_unreadable", action="closing its link")
        finally:
            self._writer.close()

    def _take(self, message: ControlMessage | ControlReply, tasks: asyncio.TaskGroup) -> None:
        match message:
            case ControlMessage(number=0, kind=kind, body=body):
                self.message_handlers[kind](body)
            case ControlMessage() as call:
                tasks.create_task(self._answer(call))
            case ControlReply(number=number) as answer:
                waiting = self._open.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)

    def send(self, kind: QuestionKind, body: object = None) -> None:
        """Send a message, which has no reply."""
        self._send(ControlMessage(kind=kind, body=_raw(body)))

    async def ask(
        self, kind: QuestionKind, body: object = None, timeout_s: float = TIMEOUT_S
    ) -> bytes:
        """Send a question; return the reply as JSON.

        Raises:
            TimeoutError: No reply arrived in time.
            TandemError: The peer rejected the question.
        """
        number = next(self._numbers)
        self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(ControlMessage(kind=kind, body=_raw(body), number=number))
            async with asyncio.timeout(timeout_s):
                answer = await self._open[number]
        finally:
            del self._open[number]
        if answer.error is not None:
            raise error_from_info(answer.error)
        return bytes(answer.body)

    async def ask_others(self, kind: QuestionKind, body: object = None) -> WorkerReplies:
        """Send a question to all other workers. Without a reply from the parent, the result is empty."""
        question = Question(kind=kind, body=_raw(body))
        try:
            answers = await self.ask("others", question, 2 * TIMEOUT_S)
        except TimeoutError:
            return WorkerReplies()
        return msgspec.json.decode(answers, type=WorkerReplies)

    def send_start(self, start: WorkerStart) -> None:
        """Send the first line to a worker."""
        self._writer.write(msgspec.json.encode(start) + b"\n")

    def end(self) -> None:
        """End this side of the link; nothing is sent afterwards. Safe to call twice."""
        if not self._is_ended and not self._writer.is_closing():
            self._is_ended = True
            self._writer.write_eof()

    def _send(self, message: ControlMessage | ControlReply) -> None:
        if not self._is_ended and not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(message) + b"\n")

    async def _answer(self, call: ControlMessage) -> None:
        try:
            body = await self.question_handlers[call.kind](call.body)
        except TandemError as error:
            self._send(ControlReply(number=call.number, error=error.info()))
        except Exception:  # one failed reply must not stop this process; it counts as silent
            log.exception("question.failed", kind=call.kind)
        else:
            self._send(ControlReply(number=call.number, body=_raw(body)))

    async def _lines(self) -> AsyncIterator[bytes]:
        """Yield lines until the peer ends its side. An incomplete last line is dropped: its writer was killed."""
        try:
            while (received := await self._reader.readline()).endswith(b"\n"):
                yield received
        except ConnectionError:
            return
        except ValueError:  # a line beyond the limit closes only this link
            log.exception("edge_worker.line_too_long", limit_bytes=LINE_LIMIT_BYTES)


def _raw(body: object) -> msgspec.Raw:
    return body if isinstance(body, msgspec.Raw) else msgspec.Raw(msgspec.json.encode(body))


def read_start(stdin: int) -> WorkerStart | None:
    """Read the first line of standard input and nothing more; None if the parent has ended."""
    with open(stdin, "rb", buffering=0, closefd=False) as parent:
        received = parent.readline()
    return msgspec.json.decode(received, type=WorkerStart) if received else None


def socket_of(stdin: int) -> socket.socket:
    """Return standard input as a socket."""
    return socket.socket(fileno=os.dup(stdin))
