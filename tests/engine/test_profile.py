import pytest

from tandem.engine.profile import DecodeTimes, PrefillTimes, Profile, read_profile
from tandem.wire.errors import ConfigInvalid


def test_forward_time_is_the_sum_of_its_parts():
    prefill = PrefillTimes(
        base_ms=5, per_token_ms=0.5, per_context_token_ms=0.01, per_pair_ms=0.0001
    )
    decode = DecodeTimes(base_ms=10, per_request_ms=0.25, per_context_token_ms=0.001)
    assert prefill.forward_s(100, 2000, 200_000) == pytest.approx(0.095)
    assert decode.forward_s(4, 1000) == pytest.approx(0.012)
    assert prefill.forward_s(0, 0, 0) == decode.forward_s(0, 0) == 0


def test_omitted_profile_fields_are_zero(tmp_path):
    file = tmp_path / "profile.json"
    file.write_text('{"origin": "a guess", "decode": {"base_ms": 12.5}}')
    assert read_profile(file) == Profile(decode=DecodeTimes(base_ms=12.5), origin="a guess")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"decode": {"base_ms": -1}}', r"\$.decode.base_ms"),
        ('{"decode": {"base": 1}}', "base"),
        ('{"prefill": {"per_token_ms": "5"}}', r"\$.prefill.per_token_ms"),
        ('{"prefill": {"base_ms": 1e9}}', r"\$.prefill.base_ms"),
        ('{"node": {"model": "llama-8b"}}', "unknown field `node`"),
        ("{", "truncated"),
    ],
)
def test_invalid_profile_is_refused_with_the_position(tmp_path, text, place):
    file = tmp_path / "profile.json"
    file.write_text(text)
    with pytest.raises(ConfigInvalid, match=place):
        read_profile(file)


def test_missing_profile_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigInvalid, match=r"nowhere\.json cannot be read"):
        read_profile(tmp_path / "nowhere.json")
