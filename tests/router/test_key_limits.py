import pytest

from tandem.router.arguments import parse
from tandem.router.key_limits import KeyLimit, KeyUsage, max_priority, read_limits
from tandem.wire.errors import ConfigInvalid, RateLimited

NODES = ["--prefill", "http://p:1", "--decode", "http://d:1"]


def written(tmp_path, text) -> str:
    path = tmp_path / "limits.toml"
    path.write_text(text)
    return str(path)


def test_limits_are_read_from_a_file(tmp_path):
    path = written(
        tmp_path, "[default]\nrequests_per_minute = 60\n[0a1b2c3d]\ntokens_per_minute = 9"
    )
    limits = {
        "default": KeyLimit(requests_per_minute=60),
        "0a1b2c3d": KeyLimit(tokens_per_minute=9),
    }
    assert read_limits(path) == limits
    config = parse([*NODES, "--api-key", "k", "--key-limits", path])
    assert config.admission.key_limits == limits


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[alice]\nrequests_in_flight = 1", "sha256sum"),
        ("[default]\nrequests = 1", "requests"),
        ("[default]\nrequests_in_flight = -1", "at least 1"),
        ("[default]\nmax_priority = -1", "at least 1"),
        ("[default", "--key-limits"),
    ],
)
def test_invalid_limits_file_is_rejected_with_a_remedy(tmp_path, text, said):
    with pytest.raises(ConfigInvalid, match=said):
        read_limits(written(tmp_path, text))


def test_section_sets_the_highest_priority_of_its_key(tmp_path):
    path = written(tmp_path, "[default]\nmax_priority = 2\n[0a1b2c3d]\nrequests_in_flight = 8")
    limits = read_limits(path)
    assert max_priority(limits, "ffffffff") == 2
    assert max_priority(limits, "0a1b2c3d") == max_priority({}, "ffffffff") == 0
    assert limits["default"].divided(4).max_priority == 2


def test_key_limits_without_api_keys_are_rejected(tmp_path):
    path = written(tmp_path, "[default]\nrequests_in_flight = 1")
    with pytest.raises(ConfigInvalid, match="--api-key"):
        parse([*NODES, "--key-limits", path])


def test_key_may_burst_a_minute_of_requests_and_then_refills():
    usage = KeyUsage({"default": KeyLimit(requests_per_minute=30)}).of("k", 0.0)
    for _ in range(30):
        usage.begin(1, 0.0)
    with pytest.raises(RateLimited) as refused:
        usage.begin(1, 0.5)
    assert refused.value.retry_after_s == 2
    usage.begin(1, 2.0)


def test_prompt_over_the_token_budget_delays_the_next_request_until_refilled():
    usage = KeyUsage({"default": KeyLimit(tokens_per_minute=60)}).of("k", 0.0)
    usage.begin(1000, 0.0)
    with pytest.raises(RateLimited) as refused:
        usage.begin(1, 0.0)
    assert refused.value.retry_after_s == 941


def test_rejected_request_uses_no_budget():
    usage = KeyUsage({"default": KeyLimit(requests_per_minute=1, tokens_per_minute=60)}).of(
        "k", 0.0
    )
    usage.begin(50, 0.0)
    for _ in range(5):
        with pytest.raises(RateLimited):
            usage.begin(20, 30.0)
    usage.begin(20, 60.0)
    assert usage.num_in_flight == 2


def test_concurrent_requests_of_a_key_are_bounded():
    usage = KeyUsage({"default": KeyLimit(requests_in_flight=1)}).of("k", 0.0)
    usage.begin(1, 0.0)
    with pytest.raises(RateLimited):
        usage.begin(1, 0.0)
    usage.finish()
    usage.begin(1, 0.0)


def test_keys_without_limits_are_not_tracked():
    keys = KeyUsage({"0a1b2c3d": KeyLimit(requests_in_flight=1)})
    assert keys.of("ffffffff", 0.0) is None
    assert keys.of("", 0.0) is None
    assert keys.of("0a1b2c3d", 0.0) is keys.of("0a1b2c3d", 9.0) is not None


def test_limit_is_divided_over_edge_workers_with_a_minimum_of_one():
    limit = KeyLimit(requests_in_flight=2, requests_per_minute=90)
    assert limit.divided(4) == KeyLimit(requests_in_flight=1, requests_per_minute=23)
