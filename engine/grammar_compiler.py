"""Grammars become automata over the model's tokens, beside the engine's loop.

xgrammar compiles them on its own threads and keeps them in its own cache. It releases the interpreter's
lock while it compiles (in one compilation of 24 s, another thread never paused for over 9 ms). A thread
cannot be ended: one that passes the time limit is left to itself, and holds its worker until it is done.
"""

import copy
import json
import os
import re
import threading
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
_MAX_QUEUED = 64
_TOO_COMPLEX = (
    "the grammar is too complex to compile in time; use fewer or smaller repetition bounds (maxLength, "
    "maxItems, {m,n}) and enums"
)
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


class GrammarCompiler:
    """Compiles each grammar once, and lets nobody wait for long.

    Reads the model's vocabulary when it is made: with the interpreter's lock, for half a second and more.

    Args:
        vocab_size: Width of the logits; may be larger than the tokenizer's vocabulary.
        eos_token_ids: What may follow a finished grammar.
        time_limit_s: A grammar may wait this long for a worker, and be compiled for as long.
    """

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        *,
        time_limit_s: float = 10.0,
    ) -> None:
        self._time_limit_s = time_limit_s
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="grammar-compiler")
        self._library = _make_library(model_dir, vocab_size, eos_token_ids)
        # Guards what follows. Answers are settled under it: what they call back may call `compile`.
        self._lock = threading.RLock()
        # Of grammars that wait or are compiled, late ones too. Finished ones are in the library's cache.
        self._answers: dict[Grammar, Future[CompiledGrammar]] = {}

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Return the compiled grammar as a future, which cannot be cancelled; never blocks.

        Its exceptions:
            InvalidRequest: The grammar is wrong or too complex, or the model cannot do it.
            Overloaded: Other grammars keep every worker busy.
            EngineFailed: A fault of this node; the log has more.
        """
        with self._lock:
            answer = self._answers.get(grammar)
            if answer is None:
                answer = self._answers[grammar] = Future()
                answer.set_running_or_notify_cancel()  # others may wait for it
                self._queue(grammar, answer)
            return answer

    def close(self) -> None:
        """Take no more grammars; those under way end in their own time."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _queue(self, grammar: Grammar, answer: Future[CompiledGrammar]) -> None:
        if len(self._answers) > _MAX_QUEUED:
            self._end(grammar, _overloaded())
            return
        try:
            waiting = self._limit(answer, _overloaded())
            self._workers.submit(self._work, grammar, waiting)
        except RuntimeError:  # no thread is left; an older one may still take the grammar
            self._end(grammar, _overloaded())

    def _limit(self, answer: Future[CompiledGrammar], refusal: TandemError) -> threading.Timer:
        timer = threading.Timer(self._time_limit_s, self._settle, [answer, refusal])
        timer.daemon = True
        timer.start()
        return timer

    def _work(self, grammar: Grammar, waiting: threading.Timer) -> None:
        waiting.cancel()
        answer = self._answers.get(grammar)
        if answer is not None:
            self._end(grammar, _overloaded() if answer.done() else self._compiled(grammar, answer))

    def _compiled(
        self, grammar: Grammar, answer: Future[CompiledGrammar]
    ) -> CompiledGrammar | TandemError:
        if isinstance(self._library, TandemError):
            # A copy: each that raises it adds frames, and so what those hold.
            return copy.copy(self._library)
        try:
            limit = self._limit(answer, InvalidRequest(_TOO_COMPLEX))
            try:
                return compile_text(self._library, grammar)
            finally:
                limit.cancel()
        except TandemError as error:
            return error
        except Exception as error:
            # The top of a worker, and a native library that raises what it likes: the request that waits
            # fails, and the next grammar is compiled.
            log.exception("grammar.failed", kind=grammar.kind)
            return EngineFailed(f"compiling the grammar failed: {type(error).__name__}")

    def _end(self, grammar: Grammar, outcome: CompiledGrammar | TandemError) -> None:
        with self._lock:
            answer = self._answers.pop(grammar, None)
            if answer is not None:
                self._settle(answer, outcome)

    def _settle(
        self, answer: Future[CompiledGrammar], outcome: CompiledGrammar | TandemError
    ) -> None:
        with self._lock:
            if answer.done():  # its time was over, or it was compiled just now
                return
            if isinstance(outcome, TandemError):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)


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


def _overloaded() -> Overloaded:
    return Overloaded("other grammars keep the compilers busy; try again later")


# ── the vocabulary ───────────────────────────────────────────────────────────────────────────────


def _make_library(
    model_dir: Path, vocab_size: int, eos_token_ids: frozenset[int]
) -> xgrammar.GrammarCompiler | TandemError:
    """Return xgrammar's compiler for a model, or why there is none: only grammars need it."""
    file = model_dir / "tokenizer.json"
    if not file.is_file():
        return InvalidRequest(
            "structured output needs the model's tokenizer, and this model has no tokenizer.json"
        )
    ends = sorted(token for token in eos_token_ids if 0 <= token < vocab_size)
    if not ends:
        return InvalidRequest(
            "structured output needs a model with an end-of-sequence token, and this one has none"
        )
    try:
        vocabulary = _read_vocabulary(file, vocab_size, ends)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        # The tokenizer library raises what it likes about a wrong file; its panics are no Exception.
        log.exception("grammar.vocabulary_failed", file=str(file))
        return EngineFailed("structured output is out of order: tokenizer.json cannot be read")
    # Half the cores at most: the engine may compute on them.
    threads = max(1, min(8, (os.cpu_count() or 1) // 2))
    return xgrammar.GrammarCompiler(
        vocabulary, max_threads=threads, cache_limit_bytes=_MAX_CACHED_BYTES
    )


def _read_vocabulary(
    file: Path, vocab_size: int, eos_token_ids: list[int]
) -> xgrammar.TokenizerInfo:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
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
