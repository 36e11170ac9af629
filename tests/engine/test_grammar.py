import json
import random
import re
import time

import numpy as np
import pytest
import tokenizers
import torch
import xgrammar

from tandem.engine.errors import GrammarViolated
from tandem.engine.grammar.compiler import Library, compile_text, make_library
from tandem.engine.grammar.matcher import GrammarMasks, GrammarState
from tandem.frontend.chat.grammars import after_reasoning
from tandem.frontend.replies.formats import ReasoningMarks
from tandem.wire.errors import EngineFailed, InvalidRequest
from tandem.wire.generation import Grammar

# Wider than the embedded model's 49152 and not a multiple of 32, like padded embeddings.
VOCAB_SIZE = 49_163
EOS = 2  # <|im_end|>

BYTES_EOS = 256  # of the vocabulary of single bytes
BYTES_VOCAB_SIZE = 301

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["gut", "schlecht", "größer", "日本"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
POINTS = {
    "type": "array",
    "items": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    "minItems": 1,
    "maxItems": 3,
}
DATE = r"\d{4}-(0[1-9]|1[0-2])-[0-3]\d"
ACCENTS = "[a-zäöüé日本🙂]{3,12}"
SUM = 'root ::= term ("+" term){0,4}\nterm ::= "(" root ")" | [0-9]{1,3}'


def schema(value) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(value))


def regex(text: str) -> Grammar:
    return Grammar(kind="regex", text=text)


def ebnf(text: str) -> Grammar:
    return Grammar(kind="ebnf", text=text)


@pytest.fixture(scope="module")
def library(embedded_model) -> Library:
    return make_library(embedded_model, VOCAB_SIZE, frozenset({EOS}))


@pytest.fixture(scope="module")
def token_bytes(library) -> list[bytes]:
    compiled = compile_text(library, Grammar(kind="json_object"))
    return compiled.tokenizer_info.decoded_vocab


@pytest.fixture(scope="module")
def byte_library() -> Library:
    """A vocabulary of the 256 bytes, an end-of-sequence token and padding, without whole accented letters."""
    tokens = [bytes([byte]) for byte in range(256)] + [b""]
    info = xgrammar.TokenizerInfo(tokens, vocab_size=BYTES_VOCAB_SIZE, stop_token_ids=[BYTES_EOS])
    return Library(info)


def allowed_ids(state: GrammarState, vocab_size: int = VOCAB_SIZE) -> list[int]:
    masks = xgrammar.allocate_token_bitmask(1, vocab_size)
    state.fill(masks, 0)
    bits = np.unpackbits(masks[0].numpy().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


# Tokens that end a text which random choices would extend forever.
CLOSING = {b'"', b"}", b"]", b'"}', b")", b":", b"0", b'"":'}


def generate(compiled, token_bytes, seed: int, eos: int, vocab_size: int) -> tuple[bytes, list]:
    """Draw uniformly from the allowed tokens until the end; after 30 tokens, prefer those that end the text."""
    rng, state, text, ids = random.Random(seed), GrammarState(compiled), b"", []
    while not state.is_terminated:
        allowed = allowed_ids(state, vocab_size)
        assert len(ids) < 1000, text
        if len(ids) > 30:
            closing = [t for t in allowed if t == eos or token_bytes[t] in CLOSING]
            allowed = [eos] if eos in closing else closing or allowed
        token = rng.choice(allowed)
        state.accept(token)
        ids.append(token)
        text += b"" if token == eos else token_bytes[token]
    return text, ids


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"name", "age", "mood"}
        and len(value["name"]) <= 20
        and 0 <= value["age"] <= 150
        and value["mood"] in PERSON["properties"]["mood"]["enum"]
    )


def is_points(text: str) -> bool:
    value = json.loads(text)
    return 1 <= len(value) <= 3 and all(set(point) == {"x"} for point in value)


def is_sum(text: str) -> bool:
    while (shorter := re.sub(r"\(\d+(\+\d+)*\)", "1", text)) != text:
        text = shorter
    return re.fullmatch(r"\d{1,3}(\+\d{1,3}){0,4}", text) is not None


CASES = {
    "person": (schema(PERSON), is_person),
    "points": (schema(POINTS), is_points),
    "any object": (Grammar(kind="json_object"), lambda text: type(json.loads(text)) is dict),
    "date": (regex(DATE), lambda text: re.fullmatch(DATE, text)),
    "accents": (regex(ACCENTS), lambda text: re.fullmatch(ACCENTS, text)),
    "sum": (ebnf(SUM), is_sum),
}


# ── what is generated ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("case", CASES)
def test_tokens_drawn_from_masks_follow_the_grammar(case, library, token_bytes):
    grammar, holds = CASES[case]
    compiled = compile_text(library, grammar)
    for seed in range(50):
        text, _ = generate(compiled, token_bytes, seed, EOS, VOCAB_SIZE)
        assert holds(text.decode()), text


@pytest.mark.parametrize("case", ["person", "accents"])
def test_single_byte_tokens_form_whole_characters(case, byte_library):
    grammar, holds = CASES[case]
    compiled = compile_text(byte_library, grammar)
    tokens = [bytes([byte]) for byte in range(256)]
    texts = [generate(compiled, tokens, s, BYTES_EOS, BYTES_VOCAB_SIZE)[0] for s in range(50)]
    assert all(holds(text.decode()) for text in texts)
    assert any(byte > 0x7F for byte in b"".join(texts))


def test_no_grammar_allows_special_tokens(library, token_bytes):
    state = GrammarState(compile_text(library, regex("[^x]*")))
    allowed = set(allowed_ids(state))
    assert EOS in allowed
    assert allowed.isdisjoint({0, 1, *range(3, 17)})  # <|im_start|> and its like
    assert max(allowed) < 49_152  # padding of the logits


def test_bounded_string_allows_neither_escapes_nor_control_characters(byte_library):
    bounded = {"type": "string", "minLength": 2, "maxLength": 3}
    compiled = compile_text(byte_library, schema(bounded))
    assert GrammarState(compiled, '"aé🙂"'.encode()).is_complete
    allowed = set(allowed_ids(GrammarState(compiled, b'"a'), BYTES_VOCAB_SIZE))
    assert not allowed & {*range(0x20), ord('"'), ord("\\")}
    with pytest.raises(GrammarViolated):
        GrammarState(compiled, b'"abcd')


@pytest.mark.thorough  # compiles for some seconds
@pytest.mark.parametrize("least", [0, 200])
def test_masks_of_bounded_strings_take_less_than_2_ms(least, library, token_bytes):
    bounded = {"type": "string", "minLength": least, "maxLength": 1000}
    state, rng = GrammarState(compile_text(library, schema(bounded))), random.Random(7)
    masks = xgrammar.allocate_token_bitmask(1, VOCAB_SIZE)
    state.accept(token_bytes.index(b'"'))
    words = [index for index, token in enumerate(token_bytes) if token.isalpha()]
    taken_s = []
    for _ in range(100):
        began_s = time.thread_time()
        state.fill(masks, 0)
        taken_s.append(time.thread_time() - began_s)
        state.accept(rng.choice(words))
    assert sorted(taken_s)[90] < 0.002  # with escapes it takes 0.15 to 1.7 s


def test_grammar_after_reasoning_continues_on_replay(byte_library):
    thoughts = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</t>"}
    answer = {"type": "regex", "pattern": "[0-9]+"}
    form = {"type": "sequence", "elements": [thoughts, answer]}
    tag = Grammar(
        kind="structural_tag", text=json.dumps({"type": "structural_tag", "format": form})
    )
    compiled = compile_text(byte_library, tag)
    free, bound = list(b"hm, {"), list(b"hm, {</t>")
    letter, digit = ord("x"), ord("7")
    state = GrammarState(compiled, free)
    assert {letter, digit} <= set(allowed_ids(state, BYTES_VOCAB_SIZE))
    state = GrammarState(compiled, bound)
    assert set(allowed_ids(state, BYTES_VOCAB_SIZE)) == set(b"0123456789")


# ── thoughts between special tokens ──────────────────────────────────────────────────────────────


def tag_of(*elements) -> Grammar:
    form = {"type": "sequence", "elements": elements}
    text = json.dumps({"type": "structural_tag", "format": form})
    return Grammar(kind="structural_tag", text=text)


def token(name: str | int) -> dict:
    return {"type": "token", "token": name}


def thoughts_of(opening: str | int, closing: str) -> dict:
    content = {"type": "any_text"}
    return {"type": "tag", "begin": token(opening), "content": content, "end": token(closing)}


@pytest.fixture(scope="module", params=["byte level", "byte fallback"])
def marked(request, tmp_path_factory):
    """Return the library for a tiny tokenizer with special tokens, the ids of its tokens, and their number."""
    special = ["</s>", "[THINK]", "[/THINK]", "[OTHER]"]
    if request.param == "byte level":
        letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        decoder = tokenizers.decoders.ByteLevel()
    else:
        letters = [f"<0x{byte:02X}>" for byte in range(256)]
        parts = [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
        decoder = tokenizers.decoders.Sequence(parts)
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.decoder = decoder
    made.add_special_tokens(special)
    folder = tmp_path_factory.mktemp("marked")
    made.save(str(folder / "tokenizer.json"))
    ids = made.get_vocab()
    library = make_library(folder, len(ids) + 5, frozenset({ids["</s>"]}))
    written = compile_text(library, Grammar(kind="json_object")).tokenizer_info.decoded_vocab
    return library, ids | {word: index for index, word in enumerate(written)}, len(ids) + 5


# Files that declare `<mark>`, which is ordinary text in tokenizer.json, as special.
DECLARATIONS = {
    "tokenizer_config.json": {
        "added_tokens_decoder": {"257": {"content": "<mark>", "special": True}}
    },
    "special_tokens_map.json": {"additional_special_tokens": ["<mark>"]},
}


@pytest.mark.parametrize("name", [None, *DECLARATIONS])
def test_special_tokens_may_be_declared_outside_of_tokenizer_json(name, tmp_path):
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate([*letters, "</s>", "<mark>"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    if name is not None:
        (tmp_path / name).write_text(json.dumps(DECLARATIONS[name]))
    library = make_library(tmp_path, 258, frozenset({256}))
    allowed = allowed_ids(GrammarState(compile_text(library, regex("<mark>|b"))), 258)
    assert allowed == [words["<"], words["b"], *([] if name else [257])]
    assert library.special_ids == ({"<mark>": 257} if name else {})


def test_reasoning_tokens_are_allowed_only_around_the_reasoning(marked):
    library, ids, vocab_size = marked
    opening, closing, end = ids["[THINK]"], ids["[/THINK]"], ids["</s>"]
    special = {opening, closing, end, ids["[OTHER]"]}
    thoughts = ReasoningMarks("[THINK]", "[/THINK]", is_open=False)
    asked = after_reasoning(Grammar(kind="json_object"), thoughts, lambda mark: mark in ids)
    compiled = compile_text(library, asked)

    def write(*parts: str | int) -> list[int]:
        """Return the ids of texts, byte by byte, and of ids."""
        return [
            token_id
            for part in parts
            for token_id in (
                [part] if isinstance(part, int) else [ids[bytes([byte])] for byte in part.encode()]
            )
        ]

    def marks_after(*parts: str | int) -> set[int]:
        sent = write(*parts)
        state = GrammarState(compiled)
        for token_id in sent:
            state.accept(token_id)
        allowed = allowed_ids(state, vocab_size)
        assert allowed == allowed_ids(GrammarState(compiled, sent), vocab_size)  # a replay's
        assert allowed
        return special & set(allowed)

    assert marks_after() == {opening}
    for thought in ("", "Hm {é", '{"a": 1}', "[THINK]"):
        assert marks_after(opening, thought) == {closing}
    assert marks_after(opening, "Hm", closing) == set()
    assert marks_after(opening, closing, "{") == set()
    for done in ([opening, "Hm", closing, "{}"], ["{}"]):
        assert marks_after(*done) == {end}
    others = (opening, end, ids["[OTHER]"])
    for wrong in ([closing], *([opening, "Hm", other] for other in others)):
        with pytest.raises(GrammarViolated):
            GrammarState(compiled, write(*wrong))


# A format of any text or tokens, with the special tokens that it names.
FREE = {
    "regex": (regex("[^x]*"), set()),
    "any text": (tag_of({"type": "any_text"}), set()),
    "any tokens": (tag_of({"type": "any_tokens"}), set()),
    "exclude token": (tag_of({"type": "exclude_token", "exclude_tokens": [0]}), set()),
    "dispatch": (
        tag_of(
            {
                "type": "token_triggered_tags",
                "trigger_tokens": ["a"],
                "tags": [thoughts_of("a", "[OTHER]")],
            }
        ),
        {259},
    ),
    "any tokens behind a token": (
        tag_of({"type": "optional", "content": token("[THINK]")}, {"type": "any_tokens"}),
        {257},
    ),
    "rules of tokens": (ebnf("root ::= ExcludeToken(0)* Token(257)"), set()),
}


@pytest.mark.parametrize("name", FREE)
def test_no_format_allows_a_special_token_it_does_not_name(marked, name):
    library, ids, vocab_size = marked
    assert [ids[word] for word in ("</s>", "[THINK]", "[/THINK]", "[OTHER]")] == [
        256,
        257,
        258,
        259,
    ]
    grammar, named = FREE[name]
    allowed = set(allowed_ids(GrammarState(compile_text(library, grammar)), vocab_size))
    assert allowed & {257, 258, 259} <= named
    assert ids[b"a"] in allowed


def test_tag_with_an_unknown_token_is_refused_by_name(marked):
    with pytest.raises(InvalidRequest, match=r'"\[NONE\]" not found in vocabulary'):
        compile_text(marked[0], tag_of(token("[NONE]")))


def test_tags_that_differ_in_one_token_have_separate_masks(marked):
    library, ids, vocab_size = marked
    for name in ("[THINK]", "[/THINK]", "[OTHER]", "[THINK]"):
        compiled = compile_text(library, tag_of(token(name), {"type": "any_text"}))
        assert allowed_ids(GrammarState(compiled), vocab_size) == [ids[name]]


def test_schema_in_a_tag_is_not_parsed_as_a_token(marked):
    library, ids, _ = marked
    word = token("[THINK]")
    compiled = compile_text(
        library, tag_of({"type": "json_schema", "json_schema": {"const": word}})
    )
    text = json.dumps(word, separators=(",", ":")).encode()
    assert GrammarState(compiled, [ids[bytes([byte])] for byte in text]).is_complete


def test_bounded_string_in_a_tag_matches_that_of_a_schema(byte_library):
    bounded = {"type": "json_schema", "json_schema": {"type": "string", "maxLength": 3}}
    alike = {"type": "regex", "pattern": '[^"\\\\\\r\\n]{1,3}'}  # looks like the library's own rule
    compiled = compile_text(byte_library, tag_of(alike, bounded))
    assert GrammarState(compiled, '\t"aéb"'.encode()).is_complete
    for wrong in (b'a"abcd', b'a"\t', b'a"\\', b"\\n"):
        with pytest.raises(GrammarViolated):
            GrammarState(compiled, wrong)


def test_schema_text_that_looks_like_a_rule_is_unchanged(byte_library):
    word = 'größe \\xdfe ÿ0\nx ::= (([^\\"\\\\\\r\\n]))\nb'
    value = {"type": "array", "prefixItems": [{"const": word}, {"type": "string", "maxLength": 2}]}
    compiled = compile_text(byte_library, schema(value))
    assert GrammarState(compiled, json.dumps([word, "ab"], ensure_ascii=False).encode()).is_complete


def test_bounded_string_does_not_change_the_rest_of_the_schema(byte_library):
    rest = {
        "code": {"type": "string", "pattern": r"^[a-z]+\w\.é[^b]$"},
        "mail": {"type": "string", "format": "email"},
        "any": {},
        "map": {"type": "object", "patternProperties": {"^ß\\d": {"type": "number"}}},
        "tree": {"$ref": "#/$defs/tree"},
    }
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}}
    short = {"type": "string", "maxLength": 2}
    value = {
        "$defs": {"tree": tree},
        "type": "object",
        "properties": {"short": short} | rest,
        "required": ["short", *rest],
    }
    answer = {
        "short": "ab",
        "code": "abc.éx",
        "mail": "a.b@c.de",
        "any": [{"ö": "\n"}, 1.5e3, None],
        "map": {"ß1": 2},
        "tree": {"next": {"next": {}}},
    }
    compiled = compile_text(byte_library, schema(value))
    text = json.dumps(answer, ensure_ascii=False).encode()
    assert GrammarState(compiled, text).is_complete
    with pytest.raises(GrammarViolated):
        GrammarState(compiled, text.replace(b'"ab"', b'"abc"'))


# ── one request ──────────────────────────────────────────────────────────────────────────────────


def test_end_of_sequence_is_allowed_exactly_where_the_text_may_end(byte_library):
    state = GrammarState(compile_text(byte_library, regex("ab?")))
    assert allowed_ids(state, BYTES_VOCAB_SIZE) == [ord("a")]
    state.accept(ord("a"))
    assert allowed_ids(state, BYTES_VOCAB_SIZE) == [ord("b"), BYTES_EOS]
    state.accept(ord("b"))
    assert allowed_ids(state, BYTES_VOCAB_SIZE) == [BYTES_EOS]
    assert not state.is_terminated


def test_only_end_of_sequence_ids_are_allowed_after_the_end(byte_library):
    state = GrammarState(compile_text(byte_library, regex("ab?")), [ord("a"), BYTES_EOS])
    assert state.is_terminated
    state.accept(BYTES_EOS)  # ignore_eos goes on
    assert allowed_ids(state, BYTES_VOCAB_SIZE) == [BYTES_EOS]
    with pytest.raises(GrammarViolated):
        state.accept(ord("b"))


@pytest.mark.parametrize("token", [ord("x"), BYTES_EOS, 300, 10**6, -1])
def test_token_that_violates_the_grammar_is_reported(token, byte_library):
    state = GrammarState(compile_text(byte_library, regex("abc")), b"a")
    with pytest.raises(GrammarViolated, match=f"token {token} at index 1 "):
        state.accept(token)
    assert allowed_ids(state, BYTES_VOCAB_SIZE) == [ord("b")]


def test_replayed_tokens_give_the_same_masks(library, token_bytes):
    compiled = compile_text(library, schema(PERSON))
    _, ids = generate(compiled, token_bytes, 7, EOS, VOCAB_SIZE)
    original = GrammarState(compiled)
    for length, token in enumerate(ids):
        replayed = GrammarState(compiled, ids[:length])
        assert allowed_ids(replayed) == allowed_ids(original)
        original.accept(token)
    assert GrammarState(compiled, ids).is_terminated


def test_dead_end_of_the_grammar_ends_the_text():
    info = xgrammar.TokenizerInfo([b"a", b""], vocab_size=33, stop_token_ids=[1])
    compiled = compile_text(Library(info), regex("ab"))  # no token of this vocabulary has a b
    state = GrammarState(compiled, [0])
    assert allowed_ids(state, 33) == [1]
    state.accept(1)
    assert state.is_terminated
    assert GrammarState(compiled, [0, 1]).is_terminated


# ── a batch ──────────────────────────────────────────────────────────────────────────────────────


def test_batch_masks_match_the_masks_of_single_states(library):
    date = compile_text(library, regex(DATE))
    person = compile_text(library, schema(PERSON))
    ended = GrammarState(compile_text(library, regex("a?")), [EOS])
    states = [GrammarState(date), GrammarState(person), ended]
    masks = GrammarMasks(VOCAB_SIZE).fill(states)
    assert masks.shape == (3, -(-VOCAB_SIZE // 32))
    assert masks.dtype == torch.int32
    logits = torch.zeros(3, VOCAB_SIZE)
    xgrammar.apply_token_bitmask_inplace(logits, masks)
    for row, state in enumerate(states):
        assert logits[row].isfinite().nonzero().flatten().tolist() == allowed_ids(state)


# ── compilation ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar(kind="json_schema", text="{"), "JSON schema is not valid JSON"),
        (schema([1]), "object or bool"),
        (schema({"type": "strin"}), 'cannot be used: Unsupported type "strin"'),
        (schema({"type": "string", "pattern": "("}), "parenthesis is not closed"),
        (schema({"enum": []}), "must not be empty"),
        (Grammar(kind="json_schema", text='{"items":' * 200 + "[[[" * 50), "nests deeper"),
        (regex("a" * 300_000), "larger than 256 KiB"),
        (regex("[a"), "regular expression cannot be used: Regex parsing error at position 3"),
        (regex(r"(a)\1"), "Backreference"),
        (regex("a{5,2}"), "Lower bound is larger"),
        (ebnf("root ::= bar"), 'EBNF grammar cannot be used: .*Rule "bar" is not defined'),
        (ebnf('other ::= "a"'), 'root rule with name "root"'),
        (ebnf("root ::= root"), "does not allow any token of the model"),
    ],
)
def test_invalid_grammar_is_refused_with_the_reason(grammar, words, library):
    with pytest.raises(InvalidRequest, match=words) as caught:
        compile_text(library, grammar)
    assert "/project" not in str(caught.value)


def test_structured_output_needs_a_tokenizer(tmp_path):
    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json"):
        make_library(tmp_path, VOCAB_SIZE, frozenset({EOS}))


def test_structured_output_needs_an_end_of_sequence(embedded_model):
    with pytest.raises(InvalidRequest, match="end-of-sequence"):
        make_library(embedded_model, VOCAB_SIZE, frozenset({VOCAB_SIZE}))


def test_unreadable_tokenizer_is_an_internal_failure(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EngineFailed, match=r"tokenizer\.json cannot be read"):
        make_library(tmp_path, VOCAB_SIZE, frozenset({EOS}))
