"""Grammars become automata over the model's tokens, beside the engine's loop.

xgrammar compiles them and keeps them. It releases the interpreter's lock while it compiles (in one
compilation of 24 s, another thread never paused for over 9 ms), so threads suffice. A thread cannot be
ended: one that passes the time limit is left to itself, and holds its worker until it is done.

The vocabulary is read from tokenizer.json by a child process, for which this file is also a program. The
tokenizer library holds the lock while it parses: 0.4 s for 49 thousand tokens, several times that for the
largest, in which the engine's loop would stand still and its peers might take the node for lost.
"""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xgrammar
from transformers import PreTrainedTokenizerFast

from tandem.telemetry.log import get_logger
from tandem.wire.errors import EngineFailed, InvalidRequest, Overloaded, TandemError
from tandem.wire.generation import Grammar

log = get_logger(__name__)

CompiledGrammar = xgrammar.CompiledGrammar

# One large grammar does not make the next one wait, nor do two that pass their limit.
_NUM_WORKERS = 3
_MAX_QUEUED = 256
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
# The place in the library's source that begins its errors.
_ORIGIN = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: |Check failed: \(.*?\) is false: ")
# Reading a vocabulary takes 3 s for 49 thousand tokens on two cores, nearly all of it imports.
_VOCABULARY_LIMIT_S = 120


class _Job:
    """A grammar that is queued or being compiled."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.future: Future[CompiledGrammar] = Future()
        self.future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self.is_settled = self.is_late = False


class GrammarCompiler:
    """Compiles each grammar once, and lets nobody wait for long.

    The first `compile` also reads the model's vocabulary, which takes seconds.

    Args:
        vocab_size: Width of the logits; may be larger than the tokenizer's vocabulary.
        eos_token_ids: What may follow a finished grammar.
        time_limit_s: After this long a grammar counts as too complex. The vocabulary is not in it.
    """

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        *,
        time_limit_s: float = 10.0,
    ) -> None:
        self._model = (model_dir, vocab_size, eos_token_ids)
        self._time_limit_s = time_limit_s
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="grammar-compiler")
        self._lock = threading.Lock()
        # Under way. Finished ones are in the library's cache.
        self._jobs: dict[Grammar, _Job] = {}
        self._num_late = 0
        self._library: xgrammar.GrammarCompiler | None = None
        self._library_lock = threading.Lock()

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Return the compiled grammar as a future; never blocks.

        The future cannot be cancelled: others may wait for it. Its exceptions:
            InvalidRequest: The grammar is wrong or too complex, or the model cannot do it.
            Overloaded: Other grammars keep every worker busy.
            EngineFailed: A fault of this node; the log has more.
        """
        with self._lock:
            job = self._jobs.get(grammar)
            if job is not None:
                return job.future
            job = _Job(grammar)
            has_room = self._num_late < _NUM_WORKERS and len(self._jobs) < _MAX_QUEUED
            if has_room:
                self._jobs[grammar] = job
        try:
            if has_room:
                self._workers.submit(self._work, job)
        except RuntimeError as error:  # the machine allows this process no further thread
            log.warning("grammar.no_thread", reason=str(error))
            has_room = False
        if not has_room:
            self._settle(job, _overloaded(), is_over=True)
        return job.future

    def close(self) -> None:
        """Take no more grammars; those under way end in their own time."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _work(self, job: _Job) -> None:
        if job.is_settled:
            return
        timer = threading.Timer(self._time_limit_s, self._give_up, [job])
        timer.daemon = True
        try:
            library = self._ready_library()
            timer.start()
            outcome: CompiledGrammar | TandemError = compile_text(library, job.grammar)
        except TandemError as error:
            outcome = error
        except Exception as error:
            # The top of a worker, and a native library that raises what it likes: the request that waits
            # fails, and the next grammar is compiled.
            log.exception("grammar.failed", kind=job.grammar.kind)
            outcome = EngineFailed(f"compiling the grammar failed: {type(error).__name__}")
        timer.cancel()
        self._settle(job, outcome, is_over=True)

    def _ready_library(self) -> xgrammar.GrammarCompiler:
        with self._library_lock:
            if self._library is None:
                # Half the cores at most: the engine may compute on them.
                threads = max(1, min(8, (os.cpu_count() or 1) // 2))
                self._library = xgrammar.GrammarCompiler(
                    load_vocabulary(*self._model),
                    max_threads=threads,
                    cache_limit_bytes=_MAX_CACHED_BYTES,
                )
            return self._library

    def _give_up(self, job: _Job) -> None:
        """Refuse a grammar that takes too long, and those behind it once no worker is left for them."""
        with self._lock:
            if job.is_settled:
                return
            job.is_late = True
            self._num_late += 1
            is_stuck = self._num_late == _NUM_WORKERS
            stranded = list(self._jobs.values()) if is_stuck else []
        log.warning("grammar.too_complex", kind=job.grammar.kind, num_late=self._num_late)
        self._settle(job, _too_complex())
        for other in stranded:
            if not other.is_late:
                self._settle(other, _overloaded(), is_over=True)

    def _settle(
        self, job: _Job, outcome: CompiledGrammar | TandemError, *, is_over: bool = False
    ) -> None:
        """Resolve a job's future, unless that is done.

        Args:
            is_over: No worker has it any more, so that the same grammar can be asked for anew.
        """
        with self._lock:
            if is_over:
                self._num_late -= job.is_late
                job.is_late = False
                if self._jobs.get(job.grammar) is job:
                    del self._jobs[job.grammar]
            if job.is_settled:
                return
            job.is_settled = True
        # Outside of the lock: callbacks may call `compile`.
        if isinstance(outcome, TandemError):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)


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


def _too_complex() -> InvalidRequest:
    return InvalidRequest(
        "the grammar is too complex to compile in time; "
        "use fewer or smaller repetition bounds (maxLength, maxItems, {m,n}) and enums"
    )


def _overloaded() -> Overloaded:
    return Overloaded("other grammars keep the compilers busy; try again later")


# ── the vocabulary ───────────────────────────────────────────────────────────────────────────────


def load_vocabulary(
    model_dir: Path, vocab_size: int, eos_token_ids: Iterable[int]
) -> xgrammar.TokenizerInfo:
    """Return the bytes of every token id; blocks for seconds, without the interpreter's lock.

    Args:
        vocab_size: Width of the logits, at least that of the tokenizer.
        eos_token_ids: What may follow a finished grammar; at least one below `vocab_size`.

    Raises:
        InvalidRequest: The model has no tokenizer.json, or no end of sequence.
        EngineFailed: The child died or could not read the file; the log has its output.
    """
    if not (model_dir / "tokenizer.json").is_file():
        raise InvalidRequest(
            "structured output needs the model's tokenizer, and this model has no tokenizer.json"
        )
    ends = [str(token) for token in sorted(eos_token_ids) if 0 <= token < vocab_size]
    if not ends:
        raise InvalidRequest(
            "structured output needs a model with an end-of-sequence token, and this one has none"
        )
    program = [sys.executable, "-P", "-m", "tandem.engine.grammar_compiler"]
    try:
        done = subprocess.run(  # noqa: S603 - our own module, arguments as a list
            [*program, str(model_dir), str(vocab_size), *ends],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_VOCABULARY_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineFailed(f"reading tokenizer.json took over {_VOCABULARY_LIMIT_S} s") from error
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip()[-2000:]
        log.error("grammar.vocabulary_failed", status=done.returncode, stderr=words)
        raise EngineFailed("structured output is out of order: tokenizer.json cannot be read")
    return xgrammar.TokenizerInfo.deserialize_json(done.stdout.decode())


def _read_vocabulary(
    model_dir: Path, vocab_size: int, eos_token_ids: list[int]
) -> xgrammar.TokenizerInfo:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model_dir / "tokenizer.json"))
    raw = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=eos_token_ids
    )
    tokens: list[bytes | str] = [""] * vocab_size
    for token, token_id in tokenizer.get_vocab().items():
        if token_id < vocab_size:
            tokens[token_id] = token
    # The library knows special tokens by their look and takes `<|im_start|>` for its twelve
    # characters. Without text, no grammar allows it: the detokenizer would leave it out.
    for token_id, added in tokenizer.added_tokens_decoder.items():
        if added.special and token_id < vocab_size:
            tokens[token_id] = ""
    return xgrammar.TokenizerInfo.from_vocab_and_metadata(tokens, raw.dump_metadata())


def main() -> int:
    """Write the table of `model_dir vocab_size eos_token_id...` to standard output."""
    model_dir, vocab_size, *ends = sys.argv[1:]
    info = _read_vocabulary(Path(model_dir), int(vocab_size), [int(end) for end in ends])
    sys.stdout.write(info.serialize_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
