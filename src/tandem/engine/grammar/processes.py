"""Runs each grammar in a separate process, which can neither end nor delay the engine.

The grammar library is native code whose time and memory have no bound: ten tokens into an answer to
`root ::= root root | "-"`, the next token takes 8 s (xgrammar 0.2.8). A grammar process compiles one grammar and fills
the masks of all answers that follow it. It has limits of time and memory. If it exceeds one, it ends, and only its
answers fail.

```
 engine's thread ── Constraint ── thread of the process ══ Compile, Work ══▶ grammar process, forked by `host.py`
                                                       ◀══ Masks, Ended ═══
```

All processes end with the engine, because the kernel then closes its sockets.
"""

import copy
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from types import MappingProxyType
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from tandem.engine.errors import GrammarViolated
from tandem.engine.grammar.messages import Compile, Ended, Limits, Masks, Work
from tandem.telemetry.log import get_logger
from tandem.wire.errors import (
    EngineFailed,
    InvalidRequest,
    Overloaded,
    TandemError,
    error_from_info,
)
from tandem.wire.generation import Grammar

log = get_logger(__name__)

Mask = npt.NDArray[np.int32]

# Compilations at a time. Two that take the whole time limit do not block the next grammar.
_NUM_COMPILING = 3
# Grammars that wait, compile, are in use or were used last. A process has 6 MB of its own, and a small grammar 1 MB.
_MAX_PROCESSES = 64
# How long a refused grammar is not compiled again, which may take the whole time limit.
_REFUSED_S = 60.0
# CPU time after which a compilation runs only on cores that the engine leaves idle. The same applies to a process whose
# masks take this much more than `cpu_per_token_s` allows.
_SLOW_S = 0.5
# How often the engine reads the CPU time of a process that has not answered.
_CHECK_S = 0.1
_DEFAULT_LIMITS = Limits()
_DEFAULT_LOGGING = MappingProxyType({"level": "info"})


class Constraint:
    """The tokens that one answer may have next. Its state is in a grammar process.

    Attributes:
        mask: The allowed tokens, an int32 for each 32 tokens of the vocabulary. Shape (ceil(vocab_size / 32),).
            Exceptions: those of `GrammarProcesses.open`, and `GrammarViolated`.
        is_late: Whether a step has waited for `mask` in vain.
        close: Forgets the answer; so does garbage collection.
    """

    def __init__(
        self, process: "_Process", token_ids: Sequence[int], on_mask: Callable[[], None]
    ) -> None:
        self._process, self._on_mask = process, on_mask
        self._number, self._num_accepted = process.begin(), len(token_ids)
        self.close = weakref.finalize(self, process.end, self._number)
        self.close.atexit = False
        self._advance(token_ids)

    @property
    def has_mask(self) -> bool:
        """Whether `mask` has arrived, so that the next token can be sampled."""
        return self.mask.done() and self.mask.exception() is None

    def accept(self, token_id: int, *, is_last: bool = False) -> None:
        """Advance by one token and request the next mask. The last mask must be available.

        Args:
            is_last: No further mask is needed.

        Raises:
            GrammarViolated: The token is not allowed here.
        """
        if not self.mask.result()[token_id >> 5] >> (token_id & 31) & 1:
            raise GrammarViolated(token_id, self._num_accepted)
        self._num_accepted += 1
        if not is_last:
            self._advance([token_id])

    def _advance(self, token_ids: Sequence[int]) -> None:
        self.is_late = False
        on_mask = self._on_mask
        self.mask = self._process.advance(self._number, token_ids)
        self.mask.add_done_callback(lambda _mask: on_mask())


class GrammarProcesses:
    """The grammar processes of one engine. The first grammar starts their host, which takes some seconds.

    Args:
        vocab_size: Width of the logits, which may exceed the tokenizer's vocabulary.
        eos_token_ids: Ids that may follow a finished grammar.
        logging: Arguments of `telemetry.log.configure` in the processes.

    Attributes:
        limits: Limits of the processes that start next.
    """

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        logging: Mapping[str, str] = _DEFAULT_LOGGING,
    ) -> None:
        self._arguments = (
            str(model_dir),
            str(vocab_size),
            msgspec.json.encode(sorted(eos_token_ids)).decode(),
            msgspec.json.encode(dict(logging)).decode(),
        )
        self.limits = _DEFAULT_LIMITS
        self._compiling = threading.BoundedSemaphore(_NUM_COMPILING)
        self._lock = threading.Lock()  # guards the host
        self._host: _Host | None = None
        self._processes: dict[Grammar, _Process] = {}  # in order of last use

    def open(
        self, grammar: Grammar, token_ids: Sequence[int], on_mask: Callable[[], None]
    ) -> Constraint:
        """Begin an answer, without blocking.

        Args:
            token_ids: Tokens generated so far, on any node and in any attempt.
            on_mask: Called on a different thread for each mask.

        Exceptions of the masks:
            InvalidRequest: The grammar is invalid or needs too much time or memory, or the model does not support
                grammars.
            Overloaded: Other grammars, those of waiting requests included, occupy all places.
            EngineFailed: The process ended for a different reason; the log has details.
        """
        process = self._processes.pop(grammar, None)
        if process is None or process.has_ended:
            process = _Process(grammar, self)
            self._make_room()
            if len(self._processes) < _MAX_PROCESSES:
                process.start()
            else:
                process.fail(_overloaded())
        self._processes[grammar] = process
        return Constraint(process, token_ids, on_mask)

    def fork(self, kind: str) -> "_Link":
        """Return the link to a new process for a grammar of this kind. Blocks while the host starts."""
        with self._lock:
            if self._host is None or self._host.has_ended:
                self._host = _Host(self._arguments)
            host = self._host
        return _Link(*host.fork(self.limits.start_s), kind)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Occupy a place to compile. Blocks."""
        if not self._compiling.acquire(timeout=self.limits.wait_s):
            raise _overloaded()
        try:
            yield
        finally:
            self._compiling.release()

    def _make_room(self) -> None:
        """Drop ended processes and, at the limit, a refused grammar or the process that was unused for longest."""
        for grammar, process in sorted(self._processes.items(), key=lambda item: item[1].is_live):
            is_full = len(self._processes) >= _MAX_PROCESSES
            if process.has_ended or (is_full and process.is_idle):
                process.fail(EngineFailed("the grammar process was dropped"))
                del self._processes[grammar]


class _Host:
    """The process that forks the grammar processes; see `host.py`."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._link, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [
                    *(sys.executable, "-P", "-m", "tandem.engine.grammar.host"),
                    *(str(number), *arguments),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[number],
                # Two threads that share one heap of glibc use 64 MB of addresses less, which the limit counts.
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def fork(self, timeout_s: float) -> tuple[Connection, int]:
        """Return the link to a new process, and its id. A host that fails to fork is killed."""
        ours, theirs = Pipe()
        try:
            with theirs:
                send_handle(self._link, theirs.fileno(), self._process.pid)
            if not ours.poll(timeout_s):
                raise TimeoutError(f"the host did not start in {timeout_s} s")
            return ours, int(ours.recv_bytes())
        except (EOFError, OSError) as error:
            ours.close()
            self._process.kill()
            log.exception("grammar.host_failed", status=self._process.wait())
            raise EngineFailed("the host of grammar processes failed; try again") from error


class _Link:
    """The engine's end of the socket to a grammar process."""

    def __init__(self, socket: Connection, pid: int, kind: str) -> None:
        self._socket, self._pid, self._kind = socket, pid, kind

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._socket.close()

    def ask(
        self, message: Compile | Work, slow_s: float = math.inf, limit_s: float = math.inf
    ) -> Masks:
        """Send a message and return the reply.

        Args:
            slow_s: CPU time after which the process may use only cores that the engine leaves idle.
            limit_s: Time to wait for the reply.

        Raises:
            Overloaded: There was no reply in time, because other processes use the cores.
            TandemError: The process has ended.
        """
        slow_s, deadline_s = slow_s + self._cpu_s(), time.monotonic() + limit_s
        with suppress(BrokenPipeError):  # the process has ended
            self._socket.send_bytes(msgspec.msgpack.encode(message))
        while not self._socket.poll(_CHECK_S):
            if self._cpu_s() > slow_s:
                self._lower_priority()
                slow_s = math.inf
            if time.monotonic() > deadline_s:
                with suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
                raise _overloaded()
        try:
            reply = msgspec.msgpack.decode(self._socket.recv_bytes(), type=Masks | Ended)
        except (EOFError, OSError):
            lost = EngineFailed("the grammar process and its host ended; try again")
            reply = Ended(lost.info(), "unknown")
        if isinstance(reply, Masks):
            return reply
        error = error_from_info(reply.error)
        if reply.cause:
            report = log.warning if isinstance(error, InvalidRequest) else log.error
            report("grammar.process_ended", kind=self._kind, cause=reply.cause)
        raise error

    def _cpu_s(self) -> float:
        with suppress(OSError):  # the process has ended
            return time.clock_gettime(~self._pid << 3 | 2)  # the clock of clock_getcpuclockid(3)
        return 0.0

    def _lower_priority(self) -> None:
        with suppress(OSError):  # the process has ended
            threads = {int(name) for name in os.listdir(f"/proc/{self._pid}/task")}
            # During compilation, lower only the second thread, which compiles; later only the main thread is left.
            for thread in threads - {self._pid} or threads:
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


class _Process:
    """A grammar process, its answers, and the thread that talks to it."""

    def __init__(self, grammar: Grammar, owner: GrammarProcesses) -> None:
        self._grammar, self._owner = grammar, owner
        # Guards all below. Reentrant, because a collected `Constraint` may end its answer on any thread.
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._answers = set[int]()
        self._is_waiting = False
        self._masks: dict[int, Future[Mask]] = {}
        self._token_ids: dict[int, list[int]] = {}
        self._error: TandemError | None = None
        self._refused_until_s = 0.0

    @property
    def is_live(self) -> bool:
        """Whether masks may still arrive."""
        return self._error is None

    @property
    def has_ended(self) -> bool:
        """Whether the grammar needs a new process. A refused grammar does not for some time."""
        return self._error is not None and time.monotonic() >= self._refused_until_s

    @property
    def is_idle(self) -> bool:
        """Whether no answer uses the process, and it has nothing to do."""
        return not self.is_live or (self._is_waiting and not self._answers)

    def start(self) -> None:
        """Start the process and its thread."""
        try:
            threading.Thread(target=self._run, name="grammar", daemon=True).start()
        except RuntimeError:  # no thread can be started
            self.fail(_overloaded())

    def begin(self) -> int:
        """Return the number of a new answer."""
        with self._changed:
            number = next(self._numbers)
            self._answers.add(number)
            return number

    def advance(self, number: int, token_ids: Sequence[int]) -> "Future[Mask]":
        """Accept tokens of an answer; return its next mask."""
        mask: Future[Mask] = Future()
        with self._changed:
            if self._error is None:
                self._masks[number], self._token_ids[number] = mask, list(token_ids)
                self._changed.notify()
                return mask
            error = copy.copy(self._error)
        mask.set_exception(error)
        return mask

    def end(self, number: int) -> None:
        """Forget an answer. Its mask, if any is due, never arrives."""
        with self._changed:
            self._answers.discard(number)
            self._masks.pop(number, None)
            self._token_ids.pop(number, None)

    def fail(self, error: TandemError) -> None:
        """Let all masks fail, those of the future included, and end the process."""
        with self._changed:
            self._error = self._error or error
            masks, self._masks = self._masks, {}
            self._changed.notify()
        for mask in masks.values():
            mask.set_exception(copy.copy(error))  # each raise adds frames to the traceback

    def _run(self) -> None:
        limits = self._owner.limits
        try:
            with self._owner.fork(self._grammar.kind) as link:
                self._compile(link, limits)
                while (work := self._next_work()) is not None:
                    num_tokens = sum(map(len, work.token_ids.values()))
                    slow_s = _SLOW_S + limits.cpu_per_token_s * num_tokens
                    self._resolve(link.ask(work, slow_s))
        except TandemError as error:
            self.fail(error)
        except Exception as error:
            log.exception("grammar.process_failed", kind=self._grammar.kind)
            self.fail(EngineFailed(f"the grammar process failed: {type(error).__name__}"))

    def _compile(self, link: _Link, limits: Limits) -> None:
        with self._owner.compiling():
            try:
                link.ask(Compile(self._grammar, limits), _SLOW_S, limits.wait_s)
            except InvalidRequest:
                self._refused_until_s = time.monotonic() + _REFUSED_S
                raise

    def _next_work(self) -> Work | None:
        """Wait for tokens; None: the process is dropped."""
        with self._changed:
            self._is_waiting = True
            self._changed.wait_for(lambda: self._token_ids or self._error is not None)
            self._is_waiting = False
            if self._error is not None:
                return None
            work = Work(self._token_ids, frozenset(self._answers))
            self._token_ids = {}
            return work

    def _resolve(self, masks: Masks) -> None:
        with self._changed:
            due = {
                number: self._masks.pop(number, None) for number in (*masks.rows, *masks.violations)
            }
        for number, future in due.items():
            if future is None:
                continue  # the answer has ended
            if number in masks.rows:
                future.set_result(np.frombuffer(masks.rows[number], np.int32))
            else:
                future.set_exception(GrammarViolated(*masks.violations[number]))


def _overloaded() -> Overloaded:
    return Overloaded(
        "this node has no place for another grammar; try again later, or use fewer different grammars"
    )
