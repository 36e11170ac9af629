import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from tandem.frontend.text.detokenizer import (
    BYTE_OF_CHARACTER,
    CleaningDetokenizer,
    NoText,
    clean_up,
)
from tandem.frontend.text.tokenizer import Tokenizer

CHARACTERS = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
HARD = "日本語🇫🇷👩‍👩‍👧‍👦 e\u0301 \N{REPLACEMENT CHARACTER} naïve ﷽ 한국어"


def streamed(tokenizer: Tokenizer, pieces, skip: bool = True) -> str:
    detokenizer = tokenizer.detokenizer(skip)
    return "".join([detokenizer.push(piece) for piece in pieces]) + detokenizer.finish()


def in_pieces(ids: list[int], size: int) -> list[list[int]]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def made_of(vocabulary: list[str], decoder, **config) -> Tokenizer:
    """A tokenizer with this vocabulary, whose first entry is special."""
    ids = {token: index for index, token in enumerate(vocabulary)}
    backend = Backend(models.WordLevel(ids, unk_token=vocabulary[0]))
    backend.add_special_tokens([AddedToken(vocabulary[0])])
    backend.decoder = decoder
    return Tokenizer(backend, config)


class Letters(NoText):
    """A detokenizer whose ids are code points."""

    def push(self, token_ids) -> str:
        return "".join(map(chr, token_ids))


def llama() -> Tokenizer:
    """As Llama 2 and Mistral decode: ▁ is a space, <0xNN> a byte, the first space is dropped."""
    tokens = ["</s>", "▁", "▁▁", "▁a", "b", "é", ".", "<0x0A>"]
    parts = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    return made_of(
        tokens + [f"<0x{byte:02X}>" for byte in "日🇫".encode()] + ["<0xFF>"],
        decoders.Sequence(parts),
    )


OTHERS = {
    "llama": llama(),
    "metaspace": made_of(["</s>", "▁", "▁a", "b", "▁▁c"], decoders.Metaspace()),
    "wordpiece": made_of(["[SEP]", "a", "##b", "c", ".", "'"], decoders.WordPiece()),
    "bpe suffix": made_of(["<s>", "a</w>", "b", "c</w>"], decoders.BPEDecoder()),
    "no decoder": made_of(["<s>", "a", "b"], None),
    "cleaned up": made_of(
        ["<s>", "'", "n", "t", "re", ".", "", "word", "n't."], None, clean_up_decoded=True
    ),
    # Its decoder is not byte-level but ends with a byte-level step.
    "byte-level step": made_of(
        ["<s>", *(CHARACTERS[byte] for byte in "é日a".encode())],
        decoders.Sequence([decoders.ByteLevel()]),
    ),
}


@given(st.lists(st.integers(0, 49152 + 20), max_size=40), st.booleans(), st.integers(1, 5))
def test_streamed_random_ids_equal_one_decode(tokenizer, ids, skip, size):
    assert streamed(tokenizer, in_pieces(ids, size), skip) == tokenizer.decode(ids, skip)


@given(st.text(max_size=40), st.integers(1, 5), st.data())
def test_streamed_text_equals_one_decode(tokenizer, text, size, data):
    ids = tokenizer.encode(HARD + text)
    start = data.draw(st.integers(0, len(ids) - 1))
    stop = data.draw(st.integers(start, len(ids)))
    tail = ids[start:stop]
    assert streamed(tokenizer, in_pieces(tail, size)) == tokenizer.decode(tail)


@pytest.mark.parametrize("name", OTHERS)
@given(data=st.data(), skip=st.booleans(), size=st.integers(1, 4))
def test_other_decoders_stream_equals_one_decode(name, data, skip, size):
    other = OTHERS[name]
    last = other.backend.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, last), max_size=20))
    assert streamed(other, in_pieces(ids, size), skip) == other.decode(ids, skip)


def test_incomplete_character_is_held_back(tokenizer):
    ids = tokenizer.encode("🇫")
    assert len(ids) > 1
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push([token_id]) for token_id in ids] == [""] * (len(ids) - 1) + ["🇫"]


@pytest.mark.parametrize("name", ["llama", "byte-level step"])
def test_other_decoders_hold_back_incomplete_characters(name):
    other = OTHERS[name]
    characters = {"llama": [f"<0x{byte:02X}>" for byte in "日".encode()]}
    tokens = characters.get(name, [CHARACTERS[byte] for byte in "日".encode()])
    first, second, third = (other.backend.token_to_id(token) for token in tokens)
    after = other.backend.token_to_id("b" if name == "llama" else "a")
    detokenizer = other.detokenizer()
    shown = [detokenizer.push([id_]) for id_ in (first, second, third, after)]
    assert shown[:2] == ["", ""]
    assert "".join(shown) == other.decode([first, second, third, after])
    assert detokenizer.push([first, second]) == ""
    assert detokenizer.finish().strip("\N{REPLACEMENT CHARACTER}") == ""


@given(st.lists(st.sampled_from([*" 'ntsm.a", "ve", " ' ", " n", "  "])), st.integers(1, 4))
def test_streamed_clean_up_equals_that_of_the_text(parts, size):
    text = "".join(parts)
    detokenizer = CleaningDetokenizer(Letters())
    pieces = [detokenizer.push([*map(ord, piece)]) for piece in in_pieces([*text], size)]
    assert "".join(pieces) + detokenizer.finish() == clean_up(text)


@pytest.mark.parametrize("unit", ["a", " a", "a ", " ab", " ", " n", " .", " 's", "n't"])
def test_clean_up_holds_back_only_a_few_characters(unit):
    detokenizer, shown = CleaningDetokenizer(Letters()), ""
    for count in range(1, 50):
        shown += detokenizer.push([*map(ord, unit)])
        assert len(shown) >= len(clean_up(unit * count)) - 4


def test_incomplete_character_at_the_end_becomes_u_fffd(tokenizer):
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push(tokenizer.encode("🇫")[:-1]) == ""
    assert detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"


def test_invalid_byte_does_not_hold_back_later_text(tokenizer):
    detokenizer = tokenizer.detokenizer()
    [*head, _] = tokenizer.encode("🇫")
    assert detokenizer.push(head) == ""
    assert detokenizer.push(tokenizer.encode("a")) == "\N{REPLACEMENT CHARACTER}a"


@given(st.lists(st.integers(0, 255), max_size=12))
def test_invalid_utf8_stream_equals_one_decode(tokenizer, data):
    found = [tokenizer.backend.token_to_id(CHARACTERS[byte]) for byte in data]
    ids = [token_id for token_id in found if token_id is not None]
    assert streamed(tokenizer, in_pieces(ids, 1)) == tokenizer.decode(ids)


@given(st.text(max_size=40))
def test_joined_token_bytes_equal_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    joined = b"".join([tokenizer.token_bytes(token_id) for token_id in ids])
    assert joined.decode(errors="replace") == tokenizer.decode(ids, skip_special_tokens=False)


def test_sentencepiece_token_bytes_include_the_space():
    tokenizer = llama()
    assert [tokenizer.token_bytes(id_) for id_ in (0, 3, 7, 999)] == [b"</s>", b" a", b"\n", b""]
