from pathlib import Path

import pytest

from tandem.engine.profile import DecodeTimes, PrefillTimes, Profile, read_profile
from tandem.wire.errors import ConfigInvalid

PROFILES = list((Path(__file__).parents[2] / "docs/profiles").glob("*.json"))


def test_a_forward_takes_the_sum_of_its_parts_in_seconds():
    prefill = PrefillTimes(base_ms=5, per_token_ms=0.5, per_context_token_ms=0.01)
    decode = DecodeTimes(base_ms=10, per_request_ms=0.25, per_context_token_ms=0.001)
    assert prefill.forward_s(100, 2000) == pytest.approx(0.075)
    assert decode.forward_s(4, 1000) == pytest.approx(0.012)
    assert prefill.forward_s(0, 0) == decode.forward_s(0, 0) == 0


def test_a_file_says_what_takes_time_and_the_rest_takes_none(tmp_path):
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
        ("{", "truncated"),
    ],
)
def test_what_is_no_profile_is_refused_by_its_place(tmp_path, text, place):
    file = tmp_path / "profile.json"
    file.write_text(text)
    with pytest.raises(ConfigInvalid, match=place):
        read_profile(file)


@pytest.mark.parametrize("file", PROFILES, ids=lambda file: file.name)
def test_the_profiles_that_come_with_the_documentation_say_where_they_are_from(file):
    profile = read_profile(file)
    assert profile.origin
    assert 0 < profile.decode.forward_s(1, 0) < 1


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigInvalid, match=r"nowhere\.json cannot be read"):
        read_profile(tmp_path / "nowhere.json")
