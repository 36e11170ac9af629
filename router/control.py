"""The link between the parent process and one edge worker: lines of JSON over a socket pair.

```
 parent ──▶ worker     WorkerStart, then: members · leave · questions of other workers · end of input: stop
 worker ──▶ parent     ready · up (nodes that it can use) · announce · others (a question to all other workers)
```

Both ends are a `Link`. What one end tells is handled in order; what it asks is answered by a `Return`.
"""

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Literal

import msgspec

from tandem.router.config import RouterConfig
from tandem.router.membership import Members
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ErrorInfo, TandemError, error_from_info

log = get_logger(__name__)

# A worker that serves replies in milliseconds; a person who asks would rather know of one that is stuck.
TIMEOUT_S = 0.5
# The parent has little to do: one that does not answer for so long is stopped.
PARENT_TIMEOUT_S = 5.0
# Of a line: an overview with 200 requests has some 300 KB.
LINE_LIMIT_BYTES = 16 << 20

Kind = Literal[
    "members", "leave", "abort", "overview", "response", "status",
    "ready", "up", "announce", "others",
]  # fmt: skip
NOTHING = msgspec.Raw(b"null")


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first line that a worker is sent.

    Attributes:
        index: 0 ... num_workers - 1.
        socket_fd: The inherited listening socket.
        metrics_directory: Where prometheus_client keeps what all workers count; empty for an only worker.
    """

    config: RouterConfig
    index: int
    socket_fd: int
    members: Members
    metrics_directory: str = ""


class Call(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One end tells the other something, or asks it: then `number` is that of the `Return`, else 0."""

    kind: Kind
    body: msgspec.Raw = NOTHING
    number: int = 0


class Return(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to a `Call`."""

    number: int
    body: msgspec.Raw = NOTHING
    error: ErrorInfo | None = None


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker asks all other workers through the parent."""

    kind: Kind
    body: msgspec.Raw = NOTHING


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What the other workers replied; the workers in `silent` did not reply in time."""

    given: list[msgspec.Raw] = []
    silent: list[int] = []


_DECODER: msgspec.json.Decoder[Call | Return] = msgspec.json.Decoder(Call | Return)

Told = Mapping[Kind, Callable[[msgspec.Raw], None]]
Asked = Mapping[Kind, Callable[[msgspec.Raw], Awaitable[object]]]


class Link:
    """One end of a link.

    Attributes:
        on_told: Handlers of what the far side tells.
        on_asked: Handlers of its questions; what they return is sent as JSON.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.on_told: Told = {}
        self.on_asked: Asked = {}
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[Return]] = {}
        self._is_ended = False

    @classmethod
    async def over(cls, sock: socket.socket) -> "Link":
        """Return the link of one socket of a pair."""
        return cls(*await asyncio.open_unix_connection(sock=sock, limit=LINE_LIMIT_BYTES))

    async def run(self) -> None:
        """Handle what the far side sends until it ends its side, then close this side.

        A message that cannot be read ends this link alone: the worker stops, and the parent starts it again.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                async for received in self._lines():
                    self._take(_DECODER.decode(received), tasks)
        except* (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, LookupError):
            log.exception("edge_worker.message_unreadable", action="closing its link")
        finally:
            self._writer.close()

    def _take(self, message: Call | Return, tasks: asyncio.TaskGroup) -> None:
        match message:
            case Call(number=0, kind=kind, body=body):
                self.on_told[kind](body)
            case Call() as call:
                tasks.create_task(self._answer(call))
            case Return(number=number) as answer:
                asked = self._open.get(number)
                if asked is not None and not asked.done():
                    asked.set_result(answer)

    def tell(self, kind: Kind, body: object = None) -> None:
        """Send a message that has no answer."""
        self._send(Call(kind=kind, body=_raw(body)))

    async def ask(self, kind: Kind, body: object = None, timeout_s: float = TIMEOUT_S) -> bytes:
        """Return the answer to a question, as JSON.

        Raises:
            TimeoutError: There was none in time.
            TandemError: The far side rejects it.
        """
        number = next(self._numbers)
        self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Call(kind=kind, body=_raw(body), number=number))
            async with asyncio.timeout(timeout_s):
                answer = await self._open[number]
        finally:
            del self._open[number]
        if answer.error is not None:
            raise error_from_info(answer.error)
        return bytes(answer.body)

    async def ask_others(self, kind: Kind, body: object = None) -> Answers:
        """Ask all other workers; a parent that does not answer leaves the answers empty."""
        question = Question(kind=kind, body=_raw(body))
        try:
            answers = await self.ask("others", question, 2 * TIMEOUT_S)
        except TimeoutError:
            return Answers()
        return msgspec.json.decode(answers, type=Answers)

    def send_start(self, start: WorkerStart) -> None:
        """Send the first line."""
        self._writer.write(msgspec.json.encode(start) + b"\n")

    def end(self) -> None:
        """End this side: nothing more is sent. Safe to call twice."""
        if not self._is_ended and not self._writer.is_closing():
            self._is_ended = True
            self._writer.write_eof()

    def _send(self, message: Call | Return) -> None:
        if not self._is_ended and not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(message) + b"\n")

    async def _answer(self, call: Call) -> None:
        try:
            body = await self.on_asked[call.kind](call.body)
        except TandemError as error:
            self._send(Return(number=call.number, error=error.info()))
        except Exception:  # the top of an answer: this process serves on, and counts as silent
            log.exception("question.failed", kind=call.kind)
        else:
            self._send(Return(number=call.number, body=_raw(body)))

    async def _lines(self) -> AsyncIterator[bytes]:
        """Yield lines until the far side ends. The last line of a killed process may be cut off."""
        try:
            while (received := await self._reader.readline()).endswith(b"\n"):
                yield received
        except ConnectionError:
            return
        except ValueError:  # a line beyond the limit: only this link ends
            log.exception("edge_worker.line_too_long", limit_bytes=LINE_LIMIT_BYTES)


def _raw(body: object) -> msgspec.Raw:
    return body if isinstance(body, msgspec.Raw) else msgspec.Raw(msgspec.json.encode(body))


def started(stdin: int) -> WorkerStart | None:
    """Read the first line of standard input, and nothing after it; None when the parent is gone."""
    with open(stdin, "rb", buffering=0, closefd=False) as parent:
        received = parent.readline()
    return msgspec.json.decode(received, type=WorkerStart) if received else None


def socket_of(stdin: int) -> socket.socket:
    """Return standard input as the socket that it is."""
    return socket.socket(fileno=os.dup(stdin))
