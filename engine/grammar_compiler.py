"""Compiles grammars to automata over the model's tokens, on worker threads beside the engine's loop.

xgrammar compiles on its own threads and has its own cache. It releases the GIL while it compiles: during
one compilation of 24 s, another thread never paused for over 9 ms. Threads cannot be killed, so a
compilation that exceeds the time limit occupies its worker until it is done.
"""

import copy
import json
import os
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import xgrammar
from transformers import PreTrainedTokenizerFast

from tandem.telemetry.log import get_logger
from tandem.wire.errors import EngineFailed, InvalidRequest, Overloaded, TandemError
from tandem.wire.generation import Grammar

log = get_logger(__name__)

CompiledGrammar = xgrammar.CompiledGrammar

# Three, so that even two compilations over their time limit do not block the next grammar.
_NUM_WORKERS = 3
_MAX_QUEUED = 64
_TOO_COMPLEX = (
    "the grammar is too complex to compile in time; use fewer or smaller repetition bounds (maxLength, "
    "maxItems, {m,n}) and enums"
)
# Among a few dozen real schemas the largest took 21 MB; the tools of a chat take well under 1 MB.
_MAX_CACHED_BYTES = 256 << 20
_MAX_TEXT_BYTES = 256 << 10
# Limit of nested brackets. Compile time grows quadratically: 2.5 s at 400, 49 s at 2,000.
_MAX_DEPTH = 256
# Limit of white space between two JSON tokens: enough for four levels of four spaces. Without a limit
# a small model can generate blanks up to its length limit; a higher limit costs compile time.
_MAX_WHITESPACE = 20
# The library's rule for one character of a string with minLength or maxLength. It allows control
# characters, which JSON forbids, and rejects escapes (mlc-ai/xgrammar#800; open in 0.2.8). Our
# replacement also compiles faster: ten such strings in 0.03 s instead of 24 s.
_BOUNDED_CHARACTER = re.compile(
    r'^(\w+_characters\w* ::= )\(\(\[\^\\"\\\\\\r\\n\]\)\)$', re.MULTILINE
)
_JSON_CHARACTER = r'(([^\0-\x1f\"\\]) | ("\\" basic_escape))'
# The library prints \xdf, but parses \x with any number of digits; \u00df has exactly four. A pair of
# backslashes is matched too, so that the text after it is not taken for an escape.
_SHORT_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|.)")
# Text of special tokens that a tag names. No text has this byte: only the tag's token formats allow these
# tokens, and the free text around triggered tags, which the library does not check.
_UNWRITABLE = b"\xff"
# Vocabularies, and compiled tags, that name special tokens. A server names the marks of its model's thoughts.
_MAX_VOCABULARIES, _MAX_TAGS = 4, 16
# Source location and failed check at the beginning of the library's error messages.
_ORIGIN = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: |Check failed: \(.*?\) is false: ")


class Library:
    """xgrammar's compilers for one vocabulary.

    Args:
        vocabulary: Its special tokens have empty text, which no grammar allows.
        special_ids: Ids of the special tokens by name. A structural tag may name them.
    """

    def __init__(
        self,
        vocabulary: xgrammar.TokenizerInfo,
        special_ids: Mapping[str, int] = MappingProxyType({}),
        num_threads: int = 1,
    ) -> None:
        self.special_ids = special_ids
        self.compiler = xgrammar.GrammarCompiler(
            vocabulary, max_threads=num_threads, cache_limit_bytes=_MAX_CACHED_BYTES
        )
        self._vocabulary, self._num_threads = vocabulary, num_threads
        self._tokens = list(vocabulary.decoded_vocab)  # holds the GIL for 0.2 s, so only once
        self._allowing = lru_cache(_MAX_VOCABULARIES)(self._make_allowing)
        self.compile_naming = lru_cache(_MAX_TAGS)(self._compile_naming)

    def _compile_naming(self, tag: str, token_ids: frozenset[int]) -> CompiledGrammar:
        """Compile a tag that names these special tokens."""
        return _compile_tag(self._allowing(token_ids), tag)

    def _make_allowing(self, token_ids: frozenset[int]) -> xgrammar.GrammarCompiler:
        tokens = list(self._tokens)
        for token_id in token_ids:
            tokens[token_id] = _UNWRITABLE
        vocabulary = xgrammar.TokenizerInfo(
            tokens,
            vocab_size=len(tokens),
            stop_token_ids=self._vocabulary.stop_token_ids,
            add_prefix_space=self._vocabulary.add_prefix_space,
        )
        # Without its cache, which confuses rules that differ only in the tokens that they name (0.2.8).
        return xgrammar.GrammarCompiler(
            vocabulary, max_threads=self._num_threads, cache_enabled=False
        )


class GrammarCompiler:
    """Compiles grammars on worker threads, each within a time limit.

    The constructor reads the model's vocabulary and holds the GIL for half a second or more.

    Args:
        vocab_size: Width of the logits; may be larger than the tokenizer's vocabulary.
        eos_token_ids: Ids that may follow a finished grammar.
        time_limit_s: Limit of the wait for a worker, and again of the compilation.
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
        # Guards `_answers`. Reentrant: futures are resolved under it, and their callbacks may call `compile`.
        self._lock = threading.RLock()
        # Grammars that wait or are being compiled, overdue ones included. The library caches finished ones.
        self._answers: dict[Grammar, Future[CompiledGrammar]] = {}

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Return the compiled grammar as a future that cannot be cancelled. Does not block.

        Its exceptions:
            InvalidRequest: The grammar is invalid or too complex, or the model does not support grammars.
            Overloaded: Other grammars occupy all workers, or too many grammars wait.
            EngineFailed: A fault of this node; the log has details.
        """
        with self._lock:
            answer = self._answers.get(grammar)
            if answer is None:
                answer = self._answers[grammar] = Future()
                answer.set_running_or_notify_cancel()  # several requests may share the future
                self._queue(grammar, answer)
            return answer

    def close(self) -> None:
        """Stop accepting grammars, without waiting for running compilations."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _queue(self, grammar: Grammar, answer: Future[CompiledGrammar]) -> None:
        if len(self._answers) > _MAX_QUEUED:
            self._end(grammar, _overloaded())
            return
        try:
            waiting = self._limit(answer, _overloaded())
            self._workers.submit(self._work, grammar, waiting)
        except RuntimeError:  # no thread can start; an existing worker may still take the grammar
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
            # A copy, because each raise adds frames to the traceback and keeps their locals alive.
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
            # The native library may raise anything. The waiting request must fail, and the worker
            # must go on.
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
            if answer.done():  # timed out before, or compiled just before the timeout
                return
            if isinstance(outcome, TandemError):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)


def compile_text(library: Library, grammar: Grammar) -> CompiledGrammar:
    """Compile one grammar on this thread.

    Raises:
        InvalidRequest: The grammar is invalid or too large, or it allows no token of the model.
    """
    if len(grammar.text.encode(errors="replace")) > _MAX_TEXT_BYTES:
        raise InvalidRequest(f"the {_name(grammar)} is larger than {_MAX_TEXT_BYTES >> 10} KiB")
    if grammar.kind in ("json_schema", "structural_tag"):
        _check_json(grammar)
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


def _compile(library: Library, grammar: Grammar) -> CompiledGrammar:
    match grammar.kind:
        case "json_schema":
            return _compile_schema(library, grammar.text)
        case "json_object":
            return _compile_schema(library, '{"type": "object"}')
        case "regex":
            return library.compiler.compile_regex(grammar.text)
        case "ebnf":
            return library.compiler.compile_grammar(grammar.text)
        case "structural_tag":
            named = set[int]()
            form = _with_ids(json.loads(grammar.text), library.special_ids, named)
            if not named:
                return _compile_tag(library.compiler, grammar.text)
            return library.compile_naming(json.dumps(form), frozenset(named))


def _compile_schema(library: Library, schema: str) -> CompiledGrammar:
    rules = xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=_MAX_WHITESPACE)
    return library.compiler.compile_grammar(_with_json_characters(rules) or rules)


def _compile_tag(compiler: xgrammar.GrammarCompiler, tag: str) -> CompiledGrammar:
    if "Length" in tag:  # a string may be bounded
        try:
            rules = _with_json_characters(xgrammar.Grammar.from_structural_tag(tag))
            if rules is not None:
                return compiler.compile_grammar(rules)
        except RuntimeError:
            pass  # it is invalid, or it has token formats that the library can only compile directly
    return compiler.compile_structural_tag(tag)


def _with_json_characters(rules: xgrammar.Grammar) -> str | None:
    """Return the rules with JSON's own characters in bounded strings; None: no string is bounded."""
    text, num_bounded = _BOUNDED_CHARACTER.subn(lambda m: m[1] + _JSON_CHARACTER, str(rules))
    if not num_bounded:
        return None
    return _SHORT_ESCAPE.sub(lambda m: f"\\u00{m[1]}" if m[1] else m[0], text)


def _with_ids(part: Any, special_ids: Mapping[str, int], named: set[int]) -> Any:
    """Return a part of a structural tag with ids for names of special tokens. Adds these ids to `named`."""
    match part:
        case {"type": "json_schema"}:
            return part
        case {"type": "token", "token": str(name)} if name in special_ids:
            named.add(special_ids[name])
            return part | {"token": special_ids[name]}
        case dict():
            return {key: _with_ids(value, special_ids, named) for key, value in part.items()}
        case list():
            return [_with_ids(each, special_ids, named) for each in part]
        case _:
            return part


def _check_json(grammar: Grammar) -> None:
    depth = deepest = 0
    for bracket in re.findall(
        r"[\[{]|[\]}]", grammar.text
    ):  # counts brackets in strings too: no parser
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > _MAX_DEPTH:
        raise InvalidRequest(f"the {_name(grammar)} nests deeper than {_MAX_DEPTH} brackets")
    try:
        json.loads(grammar.text)
    except ValueError as error:
        raise InvalidRequest(f"the {_name(grammar)} is not valid JSON: {error}") from error


def _name(grammar: Grammar) -> str:
    return {
        "json_schema": "JSON schema",
        "json_object": "JSON grammar",
        "regex": "regular expression",
        "ebnf": "EBNF grammar",
        "structural_tag": "structural tag",
    }[grammar.kind]


def _overloaded() -> Overloaded:
    return Overloaded("other grammars keep the compilers busy; try again later")


# ── the vocabulary ───────────────────────────────────────────────────────────────────────────────


def _make_library(
    model_dir: Path, vocab_size: int, eos_token_ids: frozenset[int]
) -> Library | TandemError:
    """Return xgrammar's compiler for a model, or the error for requests with grammars if there is none."""
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
        vocabulary, special_ids = _read_vocabulary(file, vocab_size, ends)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        # The tokenizer library may raise anything for an invalid file; its panics are not Exceptions.
        log.exception("grammar.vocabulary_failed", file=str(file))
        return EngineFailed("structured output is out of order: tokenizer.json cannot be read")
    # At most half the cores, because the engine may compute on the CPU.
    threads = max(1, min(8, (os.cpu_count() or 1) // 2))
    return Library(vocabulary, special_ids, threads)


def _read_vocabulary(
    file: Path, vocab_size: int, eos_token_ids: list[int]
) -> tuple[xgrammar.TokenizerInfo, dict[str, int]]:
    """Return the vocabulary, and the ids of its special tokens by name, without ends of sequence."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
    raw = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=eos_token_ids
    )
    tokens: list[bytes | str] = [""] * vocab_size
    for token, token_id in tokenizer.get_vocab().items():
        if token_id < vocab_size:
            tokens[token_id] = token
    # The library treats special tokens such as `<|im_start|>` as ordinary text. Give them empty text, so
    # that no grammar allows them: the detokenizer would omit them.
    special_ids = dict[str, int]()
    for token_id, added in tokenizer.added_tokens_decoder.items():
        if added.special and token_id < vocab_size:
            tokens[token_id] = ""
            if token_id not in eos_token_ids:
                special_ids[added.content] = token_id
    return xgrammar.TokenizerInfo.from_vocab_and_metadata(tokens, raw.dump_metadata()), special_ids
