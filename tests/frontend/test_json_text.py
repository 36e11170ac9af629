"""JSON of clients: which texts are refused."""

import pytest

from tandem.frontend.text.json_text import MAX_DEPTH, decode


def nested(depth: int) -> bytes:
    return b'{"a":[' * (depth // 2) + b'"' + b"[{" * 300 + b'\\"]"' + b"]}" * (depth // 2)


def test_json_deeper_than_the_limit_is_refused():
    value = decode(nested(MAX_DEPTH))
    for _ in range(MAX_DEPTH // 2):
        [value] = value["a"]
    assert value == "[{" * 300 + '"]'
    with pytest.raises(ValueError, match="more than 200 levels"):
        decode(nested(MAX_DEPTH + 2))


def test_wide_text_is_not_deep():
    assert decode(b"[" + b"[{}]," * 1000 + b"1]")[-1] == 1


@pytest.mark.parametrize(
    "text", [b"NaN", b"[Infinity]", b"[-Infinity]", b"1e999", b'"\\ud800"', b'"\xff"', b"[" * 1000]
)
def test_invalid_json_is_refused(text):
    with pytest.raises(ValueError, match=r"malformed|range|truncated|codec|recursion"):
        decode(text)


def test_integer_of_any_size_is_exact():
    assert decode(str(10**100).encode()) == 10**100
