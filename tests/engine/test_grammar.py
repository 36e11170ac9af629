import json
import random
import re
import threading

import numpy as np
import pytest
import tokenizers
import torch
import xgrammar

from tandem.engine.errors import GrammarViolated
from tandem.engine.grammar import GrammarMasks, GrammarState
from tandem.engine.grammar_compiler import GrammarCompiler, Library, compile_text
from tandem.frontend.grammars import after_thoughts
from tandem.frontend.reply_formats import Thoughts
from tandem.wire.errors import EngineFailed, InvalidRequest, Overloaded
from tandem.wire.generation import Grammar
from tests.patience import PATIENCE_S, patiently

# Wider than the embedded model's 49152 and no multiple of 32, as padded embeddings are.
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
def compiler(embedded_model):
    compiler = GrammarCompiler(embedded_model, VOCAB_SIZE, frozenset({EOS}), time_limit_s=300)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def token_bytes(compiler) -> list[bytes]:
    compiled = compiler.compile(Grammar(kind="json_object")).result()
    return compiled.tokenizer_info.decoded_vocab


@pytest.fixture(scope="module")
def byte_library() -> Library:
    """A vocabulary of the 256 bytes, an end and padding: no token holds a whole accented letter."""
    tokens = [bytes([byte]) for byte in range(256)] + [b""]
    info = xgrammar.TokenizerInfo(tokens, vocab_size=BYTES_VOCAB_SIZE, stop_token_ids=[BYTES_EOS])
    return Library(info)


@pytest.fixture
def masks_of():
    made: list[GrammarMasks] = []

    def fill(states, vocab_size=VOCAB_SIZE):
        if not made:
            made.append(GrammarMasks(vocab_size))
        pending = made[0].begin(states)
        return None if pending is None else pending.result()

    return fill


def allowed_ids(state: GrammarState, vocab_size: int = VOCAB_SIZE) -> list[int]:
    masks = xgrammar.allocate_token_bitmask(1, vocab_size)
    state.fill(masks, 0)
    bits = np.unpackbits(masks[0].numpy().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


# What leads out of a text that random choices would make ever longer.
CLOSING = {b'"', b"}", b"]", b'"}', b")", b":", b"0", b'"":'}


def generate(compiled, token_bytes, seed: int, eos: int, vocab_size: int) -> tuple[bytes, list]:
    """Draw uniformly from what is allowed until the end; after 30 tokens, hurry."""
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
def test_whatever_is_drawn_from_the_masks_follows_the_grammar(case, compiler, token_bytes):
    grammar, holds = CASES[case]
    compiled = compiler.compile(grammar).result()
    for seed in range(50):
        text, _ = generate(compiled, token_bytes, seed, EOS, VOCAB_SIZE)
        assert holds(text.decode()), text


@pytest.mark.parametrize("case", ["person", "accents"])
def test_tokens_of_single_bytes_make_whole_characters(case, byte_library):
    grammar, holds = CASES[case]
    compiled = compile_text(byte_library, grammar)
    tokens = [bytes([byte]) for byte in range(256)]
    texts = [generate(compiled, tokens, s, BYTES_EOS, BYTES_VOCAB_SIZE)[0] for s in range(50)]
    assert all(holds(text.decode()) for text in texts)
    assert any(byte > 0x7F for byte in b"".join(texts))


def test_no_grammar_allows_special_tokens(compiler, token_bytes):
    state = GrammarState(compiler.compile(regex("[^x]*")).result())
    allowed = set(allowed_ids(state))
    assert EOS in allowed
    assert allowed.isdisjoint({0, 1, *range(3, 17)})  # <|im_start|> and its like
    assert max(allowed) < 49_152  # padding of the logits


def test_a_bounded_string_may_hold_escapes_and_no_control_character(byte_library):
    bounded = {"type": "string", "minLength": 2, "maxLength": 3}
    compiled = compile_text(byte_library, schema(bounded))
    assert GrammarState(compiled, rb'"a\n\u00e9"').is_complete
    assert not set(range(0x20)) & set(allowed_ids(GrammarState(compiled, b'"a'), BYTES_VOCAB_SIZE))
    with pytest.raises(GrammarViolated):
        GrammarState(compiled, b'"abcd')


def test_a_grammar_may_begin_behind_thoughts_and_a_replay_goes_on_in_it(byte_library):
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
    """Return a compiler of a tiny tokenizer with special marks, the ids of its tokens, and their number."""
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
    compiler = GrammarCompiler(folder, len(ids) + 5, frozenset({ids["</s>"]}), time_limit_s=300)
    written = compiler.compile(Grammar(kind="json_object")).result().tokenizer_info.decoded_vocab
    yield compiler, ids | {word: index for index, word in enumerate(written)}, len(ids) + 5
    compiler.close()


def test_special_marks_are_allowed_around_thoughts_and_nowhere_else(marked):
    compiler, ids, vocab_size = marked
    opening, closing, end = ids["[THINK]"], ids["[/THINK]"], ids["</s>"]
    special = {opening, closing, end, ids["[OTHER]"]}
    thoughts = Thoughts("[THINK]", "[/THINK]", is_open=False)
    asked = after_thoughts(Grammar(kind="json_object"), thoughts, lambda mark: mark in ids)
    compiled = compiler.compile(asked).result()

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


# A format of any text or tokens, and the special tokens that it names.
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
def test_no_format_allows_a_special_token_that_it_does_not_name(marked, name):
    compiler, ids, vocab_size = marked
    assert [ids[word] for word in ("</s>", "[THINK]", "[/THINK]", "[OTHER]")] == [
        256,
        257,
        258,
        259,
    ]
    grammar, named = FREE[name]
    allowed = set(allowed_ids(GrammarState(compiler.compile(grammar).result()), vocab_size))
    assert allowed & {257, 258, 259} <= named
    assert ids[b"a"] in allowed


def test_a_tag_with_a_token_that_the_model_lacks_is_refused_by_its_name(marked):
    with pytest.raises(InvalidRequest, match=r'"\[NONE\]" not found in vocabulary'):
        marked[0].compile(tag_of(token("[NONE]"))).result()


def test_tags_that_differ_only_in_a_token_have_masks_of_their_own(marked):
    compiler, ids, vocab_size = marked
    for name in ("[THINK]", "[/THINK]", "[OTHER]", "[THINK]"):
        compiled = compiler.compile(tag_of(token(name), {"type": "any_text"})).result()
        assert allowed_ids(GrammarState(compiled), vocab_size) == [ids[name]]


def test_what_a_schema_in_a_tag_holds_is_never_taken_for_a_token(marked):
    compiler, ids, _ = marked
    word = token("[THINK]")
    compiled = compiler.compile(tag_of({"type": "json_schema", "json_schema": {"const": word}}))
    text = json.dumps(word, separators=(",", ":")).encode()
    assert GrammarState(compiled.result(), [ids[bytes([byte])] for byte in text]).is_complete


def test_a_bounded_string_in_a_tag_is_that_of_a_schema(byte_library):
    bounded = {"type": "json_schema", "json_schema": {"type": "string", "maxLength": 3}}
    alike = {"type": "regex", "pattern": '[^"\\\\\\r\\n]{1,3}'}  # reads as the library's own rule
    compiled = compile_text(byte_library, tag_of(alike, bounded))
    assert GrammarState(compiled, b'\t"a\\n\\u00e9"').is_complete
    for wrong in (b'a"abcd', b'a"\t', b"\\n"):
        with pytest.raises(GrammarViolated):
            GrammarState(compiled, wrong)


def test_a_word_of_the_schema_that_looks_like_a_rule_stays_as_it_is(byte_library):
    word = 'größe \\xdfe ÿ0\nx ::= (([^\\"\\\\\\r\\n]))\nb'
    value = {"type": "array", "prefixItems": [{"const": word}, {"type": "string", "maxLength": 2}]}
    compiled = compile_text(byte_library, schema(value))
    assert GrammarState(compiled, json.dumps([word, "ab"], ensure_ascii=False).encode()).is_complete


def test_a_bounded_string_leaves_the_rest_of_a_schema_as_it_was(byte_library):
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


def test_the_end_is_allowed_exactly_where_the_text_may_end(byte_library):
    state = GrammarState(compile_text(byte_library, regex("ab?")))
    assert allowed_ids(state, BYTES_VOCAB_SIZE) == [ord("a")]
    state.accept(ord("a"))
    assert allowed_ids(state, BYTES_VOCAB_SIZE) == [ord("b"), BYTES_EOS]
    state.accept(ord("b"))
    assert allowed_ids(state, BYTES_VOCAB_SIZE) == [BYTES_EOS]
    assert not state.is_terminated


def test_after_the_end_only_ends_are_allowed(byte_library):
    state = GrammarState(compile_text(byte_library, regex("ab?")), [ord("a"), BYTES_EOS])
    assert state.is_terminated
    state.accept(BYTES_EOS)  # ignore_eos goes on
    assert allowed_ids(state, BYTES_VOCAB_SIZE) == [BYTES_EOS]
    with pytest.raises(GrammarViolated):
        state.accept(ord("b"))


@pytest.mark.parametrize("token", [ord("x"), BYTES_EOS, 300, 10**6, -1])
def test_a_token_outside_of_the_grammar_is_named(token, byte_library):
    state = GrammarState(compile_text(byte_library, regex("abc")), b"a")
    with pytest.raises(GrammarViolated, match=f"token {token} at index 1 "):
        state.accept(token)
    assert allowed_ids(state, BYTES_VOCAB_SIZE) == [ord("b")]


def test_replay_of_sent_tokens_gives_the_same_masks(compiler, token_bytes):
    compiled = compiler.compile(schema(PERSON)).result()
    _, ids = generate(compiled, token_bytes, 7, EOS, VOCAB_SIZE)
    original = GrammarState(compiled)
    for length, token in enumerate(ids):
        replayed = GrammarState(compiled, ids[:length])
        assert allowed_ids(replayed) == allowed_ids(original)
        original.accept(token)
    assert GrammarState(compiled, ids).is_terminated


def test_a_state_that_no_token_continues_ends_the_text():
    info = xgrammar.TokenizerInfo([b"a", b""], vocab_size=33, stop_token_ids=[1])
    compiled = compile_text(Library(info), regex("ab"))  # nothing in this vocabulary writes a b
    state = GrammarState(compiled, [0])
    assert allowed_ids(state, 33) == [1]
    state.accept(1)
    assert state.is_terminated
    assert GrammarState(compiled, [0, 1]).is_terminated


# ── a batch ──────────────────────────────────────────────────────────────────────────────────────


def test_a_batch_has_the_masks_of_its_rows(compiler, masks_of):
    date = compiler.compile(regex(DATE)).result()
    person = compiler.compile(schema(PERSON)).result()
    ended = GrammarState(compiler.compile(regex("a?")).result(), [EOS])
    states = [GrammarState(date), None, GrammarState(person), ended]
    masks = masks_of(states)
    assert masks.shape == (4, -(-VOCAB_SIZE // 32))
    assert masks.dtype == torch.int32
    logits = torch.zeros(4, VOCAB_SIZE)
    xgrammar.apply_token_bitmask_inplace(logits, masks)
    for row, state in enumerate(states):
        expected = list(range(VOCAB_SIZE)) if state is None else allowed_ids(state)
        assert logits[row].isfinite().nonzero().flatten().tolist() == expected


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
        (ebnf("root ::= root"), "allows nothing that the model can write"),
    ],
)
def test_a_bad_grammar_is_refused_in_words(grammar, words, compiler):
    with pytest.raises(InvalidRequest, match=words) as caught:
        compiler.compile(grammar).result()
    assert "/project" not in str(caught.value)


class Gate:
    """Compiles at once, except grammars whose text begins with "slow": these wait for `open`."""

    def __init__(self):
        self.is_open = threading.Event()
        self.calls: list[str] = []

    def __call__(self, library, grammar):
        self.calls.append(grammar.text)
        if grammar.text.startswith("slow"):
            assert self.is_open.wait(PATIENCE_S)
        return compile_text(library, grammar)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    monkeypatch.setattr("tandem.engine.grammar_compiler.compile_text", gate)
    yield gate
    gate.is_open.set()


@pytest.fixture
def make_compiler(gate, embedded_model):
    made = []

    def make(time_limit_s=300.0):
        made.append(
            GrammarCompiler(embedded_model, VOCAB_SIZE, frozenset({EOS}), time_limit_s=time_limit_s)
        )
        return made[-1]

    yield make
    gate.is_open.set()
    for compiler in made:
        compiler.close()


def test_a_slow_grammar_delays_neither_the_caller_nor_another_and_is_compiled_once(
    gate, make_compiler
):
    compiler = make_compiler()
    slow = compiler.compile(regex("slow"))
    assert compiler.compile(regex("slow")) is slow  # under way
    assert not slow.cancel()
    assert compiler.compile(regex("fast")).result()
    assert not slow.done()
    gate.is_open.set()
    assert slow.result()
    assert sorted(gate.calls) == ["fast", "slow"]


def test_a_grammar_past_the_time_limit_is_refused_and_kept_if_it_compiles_after_all(
    gate, make_compiler
):
    compiler = make_compiler(time_limit_s=0.05)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="too complex"):
            compiler.compile(regex("slow")).result()
    assert gate.calls == ["slow"]
    gate.is_open.set()
    for _ in patiently():
        if compiler.compile(regex("slow")).exception() is None:
            break
    assert compiler.compile(regex("slow")).result(PATIENCE_S)


def test_when_every_worker_is_late_grammars_are_refused_until_one_is_done(gate, make_compiler):
    compiler = make_compiler()
    compiler._time_limit_s = 0.05
    late = [compiler.compile(regex(f"slow{number}")) for number in range(3)]
    behind = compiler.compile(regex("behind"))
    for future in late:
        assert "too complex" in str(future.exception(PATIENCE_S))
    assert isinstance(behind.exception(PATIENCE_S), Overloaded)
    assert isinstance(compiler.compile(regex("fast")).exception(), Overloaded)
    compiler._time_limit_s = 300.0
    gate.is_open.set()
    for _ in patiently():
        if not isinstance(compiler.compile(regex("fast")).exception(), Overloaded):
            break
    assert compiler.compile(regex("fast")).result(PATIENCE_S)


@pytest.mark.parametrize("broken", [lambda *_: 1 / 0, lambda *_: compile_text()])
def test_a_failure_of_ours_is_reported_and_not_remembered(make_compiler, monkeypatch, broken):
    compiler = make_compiler()
    with monkeypatch.context() as patch:
        patch.setattr("tandem.engine.grammar_compiler.compile_text", broken)
        for _ in range(4):  # more than there are workers
            with pytest.raises(EngineFailed, match="Error"):
                compiler.compile(regex("a")).result(PATIENCE_S)
    assert compiler.compile(regex("a")).result(PATIENCE_S)


def test_structured_output_needs_a_tokenizer(tmp_path):
    compiler = GrammarCompiler(tmp_path, VOCAB_SIZE, frozenset({EOS}))
    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json"):
        compiler.compile(regex("a")).result()
    compiler.close()


def test_structured_output_needs_an_end_of_sequence(embedded_model):
    compiler = GrammarCompiler(embedded_model, VOCAB_SIZE, frozenset({VOCAB_SIZE}))
    with pytest.raises(InvalidRequest, match="end-of-sequence"):
        compiler.compile(regex("a")).result()
    compiler.close()


def test_a_tokenizer_that_cannot_be_read_is_our_failure(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    compiler = GrammarCompiler(tmp_path, VOCAB_SIZE, frozenset({EOS}))
    with pytest.raises(EngineFailed, match=r"tokenizer\.json cannot be read"):
        compiler.compile(regex("a")).result()
    compiler.close()
