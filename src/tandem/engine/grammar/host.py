"""`python -m tandem.engine.grammar.host SOCKET MODEL_DIR VOCAB_SIZE EOS_IDS LOGGING`: parent of the grammar processes.

It imports the grammar library and reads the vocabulary once, and forks a process for each socket that it receives.
It has no other thread, so the copies are whole. If a signal ends a process, the host reports it on the socket of that
process. The host ends when the engine closes its socket; grammar processes end when the engine closes theirs, or by
their own limits.
"""

import gc
import os
import resource
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from tandem.engine.errors import GrammarViolated
from tandem.engine.grammar.compiler import (
    CompiledGrammar,
    Library,
    compile_text,
    is_out_of_memory,
    make_library,
)
from tandem.engine.grammar.matcher import GrammarMasks, GrammarState
from tandem.engine.grammar.messages import TOO_COMPLEX, Compile, Ended, Masks, Work
from tandem.telemetry.log import configure, get_logger
from tandem.wire.errors import EngineFailed, InvalidRequest, TandemError

log = get_logger(__name__)

# The thread that compiles has this much less priority than the engine, which may compute on the same cores. Masks have
# the engine's priority, because its next step waits for them.
_COMPILE_NICE = 10
# By these the library ends after a grammar has exhausted the stack or memory, or has revealed a bug.
_CRASHES = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}


def main(descriptor: int, model_dir: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
    """Fork a grammar process for each received socket, until the engine closes the socket of this process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # an inherited SIG_IGN would hide how processes end
    torch.set_num_threads(1)
    library: Library | TandemError
    try:
        library = make_library(model_dir, vocab_size, eos_token_ids)
    except TandemError as error:
        library = error
    gc.freeze()  # the collector would copy the pages that all processes share
    link = Connection(descriptor)
    links: dict[int, Connection] = {}  # of the processes, by pidfd
    while True:
        for ready in wait([link, *links]):
            if isinstance(ready, int):
                _report_end(ready, links.pop(ready))
                continue
            try:
                theirs = Connection(recv_handle(link))
            except (EOFError, OSError):
                return
            pid = os.fork()
            if pid == 0:
                for other in (link, *links.values()):
                    other.close()
                _serve_and_exit(theirs, library)
            links[os.pidfd_open(pid)] = theirs
            with suppress(OSError):  # the engine closed the socket
                theirs.send_bytes(b"%d" % pid)


def _report_end(pidfd: int, link: Connection) -> None:
    """Reap a process. Unless it has sent `Ended` itself, send it."""
    end = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    os.close(pidfd)
    with link, suppress(OSError):  # the engine closed the socket
        if end is not None and (end.si_code != os.CLD_EXITED or end.si_status):
            link.send_bytes(msgspec.msgpack.encode(_end(end.si_code, end.si_status)))


def _end(code: int, status: int) -> Ended:
    if code == os.CLD_EXITED:
        cause = f"status {status}"
    elif status in {signal.SIGALRM, signal.SIGPROF}:
        return Ended(InvalidRequest(TOO_COMPLEX).info())
    else:
        cause = f"signal {status}"
        if status in _CRASHES:
            crash = InvalidRequest("the grammar crashes the grammar library; simplify it")
            return Ended(crash.info(), cause)
    return Ended(EngineFailed(f"the grammar process ended with {cause}; try again").info(), cause)


# ── in a grammar process ─────────────────────────────────────────────────────────────────────────


def _serve_and_exit(link: Connection, library: Library | TandemError) -> NoReturn:
    status = 1
    try:
        with suppress(EOFError, ConnectionError):  # the engine closed the socket
            serve(link, library)
        status = 0
    finally:
        os._exit(status)


def serve(link: Connection, library: Library | TandemError) -> None:
    """Compile one grammar and fill masks until the engine closes the socket. The kernel enforces the limits."""
    order = msgspec.msgpack.decode(link.recv_bytes(), type=Compile)
    try:
        _follow(link, library, order)
    except (EOFError, ConnectionError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            failure: TandemError = InvalidRequest(TOO_COMPLEX)
        elif isinstance(error, TandemError):
            failure = error
        else:
            log.exception("grammar.process_ended", kind=order.grammar.kind)
            failure = EngineFailed(f"using the grammar failed: {type(error).__name__}")
        link.send_bytes(msgspec.msgpack.encode(Ended(failure.info())))


def _follow(link: Connection, library: Library | TandemError, order: Compile) -> None:
    if isinstance(library, TandemError):
        raise library
    limits = order.limits
    with ThreadPoolExecutor(1) as thread:
        thread.submit(os.nice, _COMPILE_NICE).result()  # starts the thread, while there is memory
        _limit_memory(limits.memory_bytes)
        signal.setitimer(signal.ITIMER_PROF, limits.compile_s)  # SIGPROF ends the process
        answers = _Answers(thread.submit(compile_text, library, order.grammar).result())
    signal.setitimer(signal.ITIMER_PROF, 0)
    masks, left_s = Masks(), limits.cpu_s
    while left_s > 0:
        link.send_bytes(msgspec.msgpack.encode(masks))
        work = msgspec.msgpack.decode(link.recv_bytes(), type=Work)
        signal.setitimer(signal.ITIMER_REAL, limits.masks_s)
        began_s = time.process_time()
        masks = answers.advance(work)
        took_s = time.process_time() - began_s
        signal.setitimer(signal.ITIMER_REAL, 0)
        left_s += limits.cpu_per_token_s * sum(map(len, work.token_ids.values())) - took_s
        left_s = min(left_s, limits.cpu_s)
    raise InvalidRequest(TOO_COMPLEX)


def _limit_memory(size_bytes: int) -> None:
    """Let the kernel end this process, not the engine, when memory runs out."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + size_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # a container may mount /proc read-only
        Path("/proc/self/oom_score_adj").write_text("1000")


class _Answers:
    """The answers that follow one grammar."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._states: dict[int, GrammarState] = {}
        self._masks = GrammarMasks(compiled.tokenizer_info.vocab_size)

    def advance(self, work: Work) -> Masks:
        self._states = {n: state for n, state in self._states.items() if n in work.answers}
        violations: dict[int, tuple[int, int]] = {}
        for number, token_ids in work.token_ids.items():
            state = self._states.get(number)
            if state is None:
                state = self._states[number] = GrammarState(self._compiled)
            try:
                for token_id in token_ids:
                    state.accept(token_id)
            except GrammarViolated as error:
                violations[number] = error.token_id, error.index
        numbers = [number for number in work.token_ids if number not in violations]
        masks = self._masks.fill([self._states[number] for number in numbers])
        rows = {number: mask.numpy().tobytes() for number, mask in zip(numbers, masks, strict=True)}
        return Masks(rows, violations)


if __name__ == "__main__":
    configure(**msgspec.json.decode(sys.argv[5]))
    main(
        int(sys.argv[1]),
        Path(sys.argv[2]),
        int(sys.argv[3]),
        frozenset(msgspec.json.decode(sys.argv[4], type=list[int])),
    )
