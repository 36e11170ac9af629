"""Compiles grammars to automata over the model's tokens. Only grammar processes (`host.py`) call this.

No input bounds the time and memory of the library, so nothing here has a limit.
"""

import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import xgrammar
from transformers import PreTrainedTokenizerFast

from tandem.telemetry.log import get_logger
from tandem.wire.errors import EngineFailed, InvalidRequest
from tandem.wire.generation import MAX_GRAMMAR_BYTES, Grammar

log = get_logger(__name__)

CompiledGrammar = xgrammar.CompiledGrammar

# Maximum nesting of brackets. Compile time grows quadratically: 2.5 s at 400, 49 s at 2,000.
_MAX_DEPTH = 256
# Maximum white space between two JSON tokens: enough for four levels of four spaces. Without a limit, small models
# can generate white space up to the length limit; a higher limit costs compile time.
_MAX_WHITESPACE = 20
# The library's rule for a character of a string with minLength or maxLength. It allows control characters, which
# JSON forbids (mlc-ai/xgrammar#800; open in 0.2.8), and surrogates, which UTF-8 forbids. Our replacement allows no
# escapes: with any alternative inside the repetition the library checks the whole vocabulary for each mask, which
# takes 0.15 to 1.7 s instead of 0.1 ms.
_BOUNDED_CHARACTER = re.compile(
    r'^(\w+_characters\w* ::= )\(\(\[\^\\"\\\\\\r\\n\]\)\)$', re.MULTILINE
)
_JSON_CHARACTER = r"([^\0-\x1f\"\\\ud800-\udfff])"
# The library prints \xdf but parses any number of digits after \x, unlike the four digits of \u00df. The pattern also
# matches a pair of backslashes, so that the text after it is not mistaken for an escape.
_SHORT_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|.)")
# Stand-in text for special tokens that a structural tag names. Rules for text never match this byte, so only the tag's
# token formats allow these tokens. The exception is free text around triggered tags, which the library does not check.
_STAND_IN = b"\xff"
# Source location and failed check at the start of the library's error messages.
_ORIGIN = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: |Check failed: \(.*?\) is false: ")


class Library:
    """xgrammar's compilers for one vocabulary.

    Args:
        vocabulary: Special tokens must have empty text, which no grammar allows.
        special_ids: Ids of the special tokens by name, for structural tags that name them.
    """

    def __init__(
        self,
        vocabulary: xgrammar.TokenizerInfo,
        special_ids: Mapping[str, int] = MappingProxyType({}),
        num_threads: int = 1,
    ) -> None:
        self.special_ids = special_ids
        self._vocabulary, self._num_threads = vocabulary, num_threads
        self._tokens = list(vocabulary.decoded_vocab)

    def compiler(self, special_ids: Collection[int] = ()) -> xgrammar.GrammarCompiler:
        """Return a new compiler, whose tags may name these special tokens. Its threads do not survive a fork."""
        vocabulary = self._vocabulary
        if special_ids:
            tokens = self._tokens.copy()
            for token_id in special_ids:
                tokens[token_id] = _STAND_IN
            vocabulary = xgrammar.TokenizerInfo(
                tokens,
                vocab_size=len(tokens),
                stop_token_ids=vocabulary.stop_token_ids,
                add_prefix_space=vocabulary.add_prefix_space,
            )
        # The library's cache confuses rules that differ only in their special tokens (0.2.8).
        return xgrammar.GrammarCompiler(
            vocabulary, max_threads=self._num_threads, cache_enabled=False
        )


def compile_text(library: Library, grammar: Grammar) -> CompiledGrammar:
    """Compile one grammar on this thread.

    Raises:
        InvalidRequest: The grammar is invalid or too large, or it allows no token of the model.
        Exception: One that `is_out_of_memory` recognizes, or a bug.
    """
    if len(grammar.text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"the {_name(grammar)} is larger than {MAX_GRAMMAR_BYTES >> 10} KiB")
    if grammar.kind in ("json_schema", "structural_tag"):
        _check_json(grammar)
    try:
        compiled = _compile(library, grammar)
    except (RuntimeError, ValueError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        reason = _ORIGIN.sub("", str(error)).strip()[:500]
        raise InvalidRequest(f"the {_name(grammar)} cannot be used: {reason}") from error
    masks = xgrammar.allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
    xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(masks)
    if not masks.any():
        raise InvalidRequest(f"the {_name(grammar)} does not allow any token of the model")
    return compiled


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an exception of the library reports that it needs more memory than the limit."""
    return isinstance(error, MemoryError) or "std::bad_alloc" in str(error)


def _compile(library: Library, grammar: Grammar) -> CompiledGrammar:
    match grammar.kind:
        case "json_schema":
            return _compile_schema(library, grammar.text)
        case "json_object":
            return _compile_schema(library, '{"type": "object"}')
        case "regex":
            return library.compiler().compile_regex(grammar.text)
        case "ebnf":
            return library.compiler().compile_grammar(grammar.text)
        case "structural_tag":
            named_ids = set[int]()
            form = _with_ids(json.loads(grammar.text), library.special_ids, named_ids)
            text = json.dumps(form) if named_ids else grammar.text
            return _compile_tag(library.compiler(named_ids), text)


def _compile_schema(library: Library, schema: str) -> CompiledGrammar:
    rules = xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=_MAX_WHITESPACE)
    return library.compiler().compile_grammar(_with_json_characters(rules) or rules)


def _compile_tag(compiler: xgrammar.GrammarCompiler, tag: str) -> CompiledGrammar:
    if "Length" in tag:  # a string may be bounded
        try:
            rules = _with_json_characters(xgrammar.Grammar.from_structural_tag(tag))
            if rules is not None:
                return compiler.compile_grammar(rules)
        except RuntimeError:
            pass  # the tag is invalid, or has token formats that the library can only compile directly
    return compiler.compile_structural_tag(tag)


def _with_json_characters(rules: xgrammar.Grammar) -> str | None:
    """Return the rules with JSON's characters in bounded strings; None if no string is bounded."""
    text, num_bounded = _BOUNDED_CHARACTER.subn(lambda m: m[1] + _JSON_CHARACTER, str(rules))
    if not num_bounded:
        return None
    return _SHORT_ESCAPE.sub(lambda m: f"\\u00{m[1]}" if m[1] else m[0], text)


def _with_ids(part: Any, special_ids: Mapping[str, int], named_ids: set[int]) -> Any:
    """Return a part of a structural tag with ids instead of names of special tokens; add them to `named_ids`."""
    match part:
        case {"type": "json_schema"}:
            return part
        case {"type": "token", "token": str(name)} if name in special_ids:
            named_ids.add(special_ids[name])
            return part | {"token": special_ids[name]}
        case dict():
            return {key: _with_ids(value, special_ids, named_ids) for key, value in part.items()}
        case list():
            return [_with_ids(each, special_ids, named_ids) for each in part]
        case _:
            return part


def _check_json(grammar: Grammar) -> None:
    depth = deepest = 0
    # This is not a parser, so brackets in strings count too.
    for bracket in re.findall(r"[\[{]|[\]}]", grammar.text):
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


# ── the vocabulary ───────────────────────────────────────────────────────────────────────────────


def make_library(model_dir: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> Library:
    """Return xgrammar's compilers for a model.

    Args:
        vocab_size: Width of the logits, which may exceed the tokenizer's vocabulary.
        eos_token_ids: Ids that may follow a finished grammar.

    Raises:
        InvalidRequest: The model does not support structured output.
        EngineFailed: Its tokenizer.json cannot be read; the log has details.
    """
    file = model_dir / "tokenizer.json"
    if not file.is_file():
        raise InvalidRequest("structured output is not available: this model has no tokenizer.json")
    ends = sorted(token for token in eos_token_ids if 0 <= token < vocab_size)
    if not ends:
        raise InvalidRequest(
            "structured output is not available: this model has no end-of-sequence token"
        )
    try:
        vocabulary, special_ids = _read_vocabulary(file, vocab_size, ends)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # The tokenizer library may raise anything for an invalid file, and its panics are not Exceptions.
        log.exception("grammar.vocabulary_failed", file=str(file))
        raise EngineFailed(
            "structured output is not available: tokenizer.json cannot be read"
        ) from error
    # Use at most half of the cores, because the engine may compute on the CPU.
    threads = max(1, min(8, (os.cpu_count() or 1) // 2))
    return Library(vocabulary, special_ids, threads)


def _read_vocabulary(
    file: Path, vocab_size: int, eos_token_ids: list[int]
) -> tuple[xgrammar.TokenizerInfo, dict[str, int]]:
    """Return the vocabulary, and the ids of its special tokens other than end of sequence, by name."""
    # Special tokens may be declared only in other files, such as tokenizer_config.json.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, local_files_only=True)
    raw = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=eos_token_ids
    )
    tokens: list[bytes | str] = [""] * vocab_size
    for token, token_id in tokenizer.get_vocab().items():
        if token_id < vocab_size:
            tokens[token_id] = token
    # The library treats special tokens such as `<|im_start|>` as ordinary text. Empty text keeps grammars from
    # allowing them, because the detokenizer would omit them.
    special_ids = dict[str, int]()
    for token_id, added in tokenizer.added_tokens_decoder.items():
        if added.special and token_id < vocab_size:
            tokens[token_id] = ""
            if token_id not in eos_token_ids:
                special_ids[added.content] = token_id
    return xgrammar.TokenizerInfo.from_vocab_and_metadata(tokens, raw.dump_metadata()), special_ids
