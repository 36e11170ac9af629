"""Grammars become automata over the model's tokens, beside the engine's loop.

```
 QUEUED ──worker free──▶ RUNNING ──compiled, refused──▶ SETTLED
                         RUNNING ──time limit──▶ SETTLED (too complex) ──compiled after all──▶ SETTLED
```

A compilation runs in a thread: the library gives the interpreter's lock away while it compiles
(in one of 24 s, another thread never paused for over 9 ms), whereas handing results between processes
costs more than making them (that one: 160 s and 784 MB of JSON). A thread cannot be ended, so one that
passes the time limit is left to itself and another takes its place, a few times.
"""

import json
import os
import queue
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import xgrammar

from tandem.engine.vocabulary import load_vocabulary
from tandem.telemetry.log import get_logger
from tandem.wire.errors import EngineFailed, InvalidRequest, Overloaded, TandemError
from tandem.wire.generation import Grammar

log = get_logger(__name__)

CompiledGrammar = xgrammar.CompiledGrammar
Compile = Callable[[xgrammar.GrammarCompiler, Grammar], CompiledGrammar]

# One large grammar does not make the next one wait.
_NUM_WORKERS = 2
# Threads past the time limit that are replaced; each takes a core until it is done.
_MAX_LATE = 2
_MAX_QUEUED = 256
_MAX_CACHED = 256
# The largest of a few dozen real schemas took 21 MB; a chat's tools well under 1 MB.
_MAX_CACHED_BYTES = 256 << 20
_MAX_TEXT_BYTES = 256 << 10
# Brackets inside brackets. Time grows with the square: 2.5 s at 400, 49 s at 2,000.
_MAX_DEPTH = 256
# Of white space between two JSON tokens: four levels of four spaces. Without a bound a small model
# can write blanks until its length runs out; each one more costs compile time.
_MAX_WHITESPACE = 20
# The library's rule for one character of a string with minLength or maxLength. It lets control
# characters through, which JSON forbids, and no escapes (mlc-ai/xgrammar#800; open in 0.2.8). The
# rule in its place also compiles faster: ten such strings in 0.03 s instead of 24 s.
_BOUNDED_CHARACTER = re.compile(r'^(\w+ ::= )\(\(\[\^\\"\\\\\\r\\n\]\)\)$', re.MULTILINE)
_JSON_CHARACTER = r'(([^\0-\x1f\"\\]) | ("\\" basic_escape))'
# The library writes \xdf and reads as many digits as follow; \u00df has four. A pair of backslashes
# is matched so that what follows it is not taken for an escape.
_SHORT_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|.)")
# Where the library's source says it, before what it says.
_ORIGIN = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: |Check failed: \(.*?\) is false: ")


class _Job:
    """A grammar and what became of it; `future` is replaced when it compiles after its limit."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.future = _new_future()
        self.timer: threading.Timer | None = None
        self.is_settled = False
        self.is_late = False
        self.size_bytes = 0

    def settle(self) -> Future[CompiledGrammar]:
        """Return the future that the caller alone has to resolve; needs the lock."""
        self.is_settled = True
        return self.future


class GrammarCompiler:
    """Compiles each grammar once, keeps the last ones, and lets nobody wait for long.

    The first `compile` also reads the model's vocabulary, which takes seconds; compiling
    `Grammar(kind="json_object")` at start takes that off the first client.

    Args:
        vocab_size: Width of the logits; may be larger than the tokenizer's vocabulary.
        eos_token_ids: What may follow a finished grammar.
        time_limit_s: After this long a grammar counts as too complex. The vocabulary is not in it.
        compile_with: Does the work, in a worker thread.
    """

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        *,
        time_limit_s: float = 10.0,
        compile_with: Compile | None = None,
    ) -> None:
        self._model = (model_dir, vocab_size, eos_token_ids)
        self._time_limit_s = time_limit_s
        self._compile_with = compile_with or compile_text
        self._lock = threading.Lock()
        self._jobs: OrderedDict[Grammar, _Job] = OrderedDict()
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._num_workers = self._num_late = 0
        self._library: xgrammar.GrammarCompiler | None = None
        self._library_lock = threading.Lock()

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Return the compiled grammar as a future; never blocks, equal grammars share one.

        The future cannot be cancelled: others may wait for it. Its exceptions:
            InvalidRequest: The grammar is wrong or too complex, or the model cannot do it.
            Overloaded: Others' grammars keep every worker busy.
            EngineFailed: Our fault; the log says more.
        """
        with self._lock:
            job = self._jobs.get(grammar)
            if job is not None:
                self._jobs.move_to_end(grammar)
                return job.future
            self._fill_pool()
            if self._num_workers == 0 or self._queue.qsize() >= _MAX_QUEUED:
                return _failed(_overloaded())
            job = self._jobs[grammar] = _Job(grammar)
            self._queue.put(job)
            return job.future

    def close(self) -> None:
        """End the workers once they are done with what is queued."""
        for _ in range(_NUM_WORKERS + _MAX_LATE):
            self._queue.put(None)

    # ── in the worker threads ────────────────────────────────────────────────────────────────────

    def _fill_pool(self) -> None:
        """Start what is missing of the workers, unless too many are late; needs the lock."""
        while (
            self._num_workers < _NUM_WORKERS
            and self._num_workers + self._num_late < _NUM_WORKERS + _MAX_LATE
        ):
            # A daemon: a runaway compilation must not hold up the end of the process.
            thread = threading.Thread(target=self._work, name="grammar-compiler", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the machine allows this process no further thread
                log.warning("grammar.no_thread", reason=str(error), num_workers=self._num_workers)
                return
            self._num_workers += 1

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            self._settle(job, self._outcome(job))
            if job.is_late and not self._rejoin():
                return

    def _outcome(self, job: _Job) -> CompiledGrammar | TandemError:
        try:
            library = self._ready_library()
            self._start_clock(job)
            compiled = self._compile_with(library, job.grammar)
            job.size_bytes = compiled.memory_size_bytes
        except TandemError as error:
            return error
        except Exception as error:
            # The top of the thread's loop, and a native library that raises what it likes: the request
            # that waits fails, and the next one is compiled.
            log.exception("grammar.failed", kind=job.grammar.kind)
            return EngineFailed(f"compiling the grammar failed: {type(error).__name__}")
        else:
            return compiled

    def _ready_library(self) -> xgrammar.GrammarCompiler:
        with self._library_lock:
            if self._library is None:
                # Half the cores at most: the engine may compute on them.
                threads = max(1, min(8, (os.cpu_count() or 1) // 2))
                self._library = xgrammar.GrammarCompiler(
                    load_vocabulary(*self._model), max_threads=threads, cache_enabled=False
                )
            return self._library

    def _start_clock(self, job: _Job) -> None:
        job.timer = threading.Timer(self._time_limit_s, self._give_up, [job])
        job.timer.daemon = True
        job.timer.start()

    def _settle(self, job: _Job, outcome: CompiledGrammar | TandemError) -> None:
        if job.timer is not None:
            job.timer.cancel()
        with self._lock:
            if job.is_settled:  # too late for those who waited, not for who asks again
                job.future = _new_future()
            future = job.settle()
            if isinstance(outcome, TandemError) and not isinstance(outcome, InvalidRequest):
                self._forget(job)
            self._evict()
        # Outside of the lock: who waits may call back into `compile`.
        if isinstance(outcome, TandemError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _give_up(self, job: _Job) -> None:
        """Refuse a request whose grammar takes too long, and replace the worker that it holds."""
        stranded: list[_Job] = []
        with self._lock:
            if job.is_settled:
                return
            job.is_late = True
            future = job.settle()
            self._num_workers -= 1
            self._num_late += 1
            self._fill_pool()
            if self._num_workers == 0:
                stranded = self._empty_queue()
        log.warning("grammar.too_complex", kind=job.grammar.kind, num_late=self._num_late)
        future.set_exception(_too_complex())
        for other in stranded:
            other.settle().set_exception(_overloaded())

    def _empty_queue(self) -> list[_Job]:
        """Take out what no worker is left for; needs the lock."""
        stranded: list[_Job] = []
        while not self._queue.empty():
            if (job := self._queue.get()) is not None:
                self._forget(job)
                stranded.append(job)
        return stranded

    def _rejoin(self) -> bool:
        """After a late end: True when the pool lacks a worker."""
        with self._lock:
            self._num_late -= 1
            if self._num_workers >= _NUM_WORKERS:
                return False
            self._num_workers += 1
            return True

    def _forget(self, job: _Job) -> None:
        if self._jobs.get(job.grammar) is job:
            del self._jobs[job.grammar]

    def _evict(self) -> None:
        """Drop settled jobs, the longest unasked first, until the bounds hold; needs the lock."""
        num, size_bytes = len(self._jobs), sum(job.size_bytes for job in self._jobs.values())
        for job in list(self._jobs.values()):
            if num <= _MAX_CACHED and size_bytes <= _MAX_CACHED_BYTES:
                return
            if job.is_settled:
                del self._jobs[job.grammar]
                num, size_bytes = num - 1, size_bytes - job.size_bytes


def compile_text(library: xgrammar.GrammarCompiler, grammar: Grammar) -> CompiledGrammar:
    """Compile one grammar in this thread.

    Raises:
        InvalidRequest: It is wrong, too large, or nothing that the model can write fits it.
    """
    if len(grammar.text.encode(errors="replace")) > _MAX_TEXT_BYTES:
        raise InvalidRequest(f"the {_name(grammar)} is larger than {_MAX_TEXT_BYTES >> 10} KiB")
    if grammar.kind == "json_schema":
        _check_json(grammar.text)
    try:
        compiled = _compile(library, grammar)
    except (RuntimeError, ValueError, TypeError) as error:
        words = _ORIGIN.sub("", str(error)).strip()[:500]
        raise InvalidRequest(f"the {_name(grammar)} cannot be used: {words}") from error
    masks = xgrammar.allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
    xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(masks)
    if not masks.any():
        raise InvalidRequest(f"the {_name(grammar)} allows nothing that the model can write")
    return compiled


def _compile(library: xgrammar.GrammarCompiler, grammar: Grammar) -> CompiledGrammar:
    match grammar.kind:
        case "json_schema":
            return _compile_schema(library, grammar.text)
        case "json_object":
            return _compile_schema(library, '{"type": "object"}')
        case "regex":
            return library.compile_regex(grammar.text)
        case "ebnf":
            return library.compile_grammar(grammar.text)


def _compile_schema(library: xgrammar.GrammarCompiler, schema: str) -> CompiledGrammar:
    rules = xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=_MAX_WHITESPACE)
    text, num_bounded = _BOUNDED_CHARACTER.subn(lambda m: m[1] + _JSON_CHARACTER, str(rules))
    if not num_bounded:
        return library.compile_grammar(rules)
    return library.compile_grammar(
        _SHORT_ESCAPE.sub(lambda m: f"\\u00{m[1]}" if m[1] else m[0], text)
    )


def _check_json(text: str) -> None:
    depth = deepest = 0
    for bracket in re.findall(r"[\[{]|[\]}]", text):  # those in strings too: a bound, no parser
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > _MAX_DEPTH:
        raise InvalidRequest(f"the JSON schema nests deeper than {_MAX_DEPTH} brackets")
    try:
        json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"the JSON schema is not valid JSON: {error}") from error


def _name(grammar: Grammar) -> str:
    return {
        "json_schema": "JSON schema",
        "json_object": "JSON grammar",
        "regex": "regular expression",
        "ebnf": "EBNF grammar",
    }[grammar.kind]


def _new_future() -> Future[CompiledGrammar]:
    future: Future[CompiledGrammar] = Future()
    future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
    return future


def _failed(error: TandemError) -> Future[CompiledGrammar]:
    future = _new_future()
    future.set_exception(error)
    return future


def _too_complex() -> InvalidRequest:
    return InvalidRequest(
        "the grammar is too complex to compile in time; "
        "use fewer or smaller repetition bounds (maxLength, maxItems, {m,n}) and enums"
    )


def _overloaded() -> Overloaded:
    return Overloaded("other grammars keep the compilers busy; try again later")
