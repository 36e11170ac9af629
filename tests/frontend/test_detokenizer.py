import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from tandem.frontend.detokenizer import BYTE_OF_CHARACTER
from tandem.frontend.tokenizer import Tokenizer

CHARACTERS = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
HARD = "日本語🇫🇷👩‍👩‍👧‍👦 e\u0301 \N{REPLACEMENT CHARACTER} naïve ﷽ 한국어"


def streamed(tokenizer: Tokenizer, pieces, skip: bool = True) -> str:
    detokenizer = tokenizer.detokenizer(skip)
    return "".join([detokenizer.push(piece) for piece in pieces]) + detokenizer.finish()


def in_pieces(ids: list[int], size: int) -> list[list[int]]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def made_of(vocabulary: list[str], decoder) -> Tokenizer:
    """A tokenizer with this vocabulary, whose first entry is special."""
    ids = {token: index for index, token in enumerate(vocabulary)}
    backend = Backend(models.WordLevel(ids, unk_token=vocabulary[0]))
    backend.add_special_tokens([AddedToken(vocabulary[0])])
    backend.decoder = decoder
    return Tokenizer(backend, {})


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
    # Its decoder ends in a byte-level step, and is not one.
    "byte-level step": made_of(
        ["<s>", *(CHARACTERS[byte] for byte in "é日a".encode())],
        decoders.Sequence([decoders.ByteLevel()]),
    ),
}


@given(st.lists(st.integers(0, 49152 + 20), max_size=40), st.booleans(), st.integers(1, 5))
def test_random_ids_streamed_equal_ids_decoded_at_once(tokenizer, ids, skip, size):
    assert streamed(tokenizer, in_pieces(ids, size), skip) == tokenizer.decode(ids, skip)


@given(st.text(max_size=40), st.integers(1, 5), st.data())
def test_text_cut_at_any_token_streams_as_decoded_at_once(tokenizer, text, size, data):
    ids = tokenizer.encode(HARD + text)
    start = data.draw(st.integers(0, len(ids) - 1))
    stop = data.draw(st.integers(start, len(ids)))
    tail = ids[start:stop]
    assert streamed(tokenizer, in_pieces(tail, size)) == tokenizer.decode(tail)


@pytest.mark.parametrize("name", OTHERS)
@given(data=st.data(), skip=st.booleans(), size=st.integers(1, 4))
def test_other_decoders_stream_as_decoded_at_once(name, data, skip, size):
    other = OTHERS[name]
    last = other.backend.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, last), max_size=20))
    assert streamed(other, in_pieces(ids, size), skip) == other.decode(ids, skip)


def test_an_incomplete_character_is_held_back_until_it_is_whole(tokenizer):
    ids = tokenizer.encode("🇫")
    assert len(ids) > 1
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push([token_id]) for token_id in ids] == [""] * (len(ids) - 1) + ["🇫"]


@pytest.mark.parametrize("name", ["llama", "byte-level step"])
def test_other_decoders_show_no_part_of_a_character(name):
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


def test_a_character_that_stays_incomplete_is_replaced_at_the_end(tokenizer):
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push(tokenizer.encode("🇫")[:-1]) == ""
    assert detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"


def test_a_bad_byte_does_not_hold_back_what_follows(tokenizer):
    detokenizer = tokenizer.detokenizer()
    [*head, _] = tokenizer.encode("🇫")
    assert detokenizer.push(head) == ""
    assert detokenizer.push(tokenizer.encode("a")) == "\N{REPLACEMENT CHARACTER}a"


@given(st.lists(st.integers(0, 255), max_size=12))
def test_bytes_that_are_no_utf8_stream_as_decoded_at_once(tokenizer, data):
    found = [tokenizer.backend.token_to_id(CHARACTERS[byte]) for byte in data]
    ids = [token_id for token_id in found if token_id is not None]
    assert streamed(tokenizer, in_pieces(ids, 1)) == tokenizer.decode(ids)


@given(st.text(max_size=40))
def test_the_bytes_of_tokens_joined_are_the_texts(tokenizer, text):
    ids = tokenizer.encode(text)
    joined = b"".join([tokenizer.token_bytes(token_id) for token_id in ids])
    assert joined.decode(errors="replace") == tokenizer.decode(ids, skip_special_tokens=False)


def test_the_bytes_of_a_sentencepiece_token_have_its_space():
    tokenizer = llama()
    assert [tokenizer.token_bytes(id_) for id_ in (0, 3, 7, 999)] == [b"</s>", b" a", b"\n", b""]
