import subprocess
import sys
import tempfile
from contextlib import ExitStack

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.router.arguments import parse
from tandem.router.key_limits import KeyLimit, KeyUsage, read_limits, release_requests
from tandem.wire.errors import ConfigInvalid, RateLimited
from tests.router import key_user

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
    assert config.admission.key_limits == path


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
    keys = KeyUsage(read_limits(path))
    assert keys.max_priority("ffffffff") == 2
    assert keys.max_priority("0a1b2c3d") == KeyUsage({}).max_priority("ffffffff") == 0


def test_key_limits_without_api_keys_are_rejected(tmp_path):
    path = written(tmp_path, "[default]\nrequests_in_flight = 1")
    with pytest.raises(ConfigInvalid, match="--api-key"):
        parse([*NODES, "--key-limits", path])


def test_key_may_burst_a_minute_of_requests_and_then_refills():
    usage = KeyUsage({"default": KeyLimit(requests_per_minute=30)}).of("k")
    for _ in range(30):
        usage.begin(1, 0.0)
    with pytest.raises(RateLimited) as refused:
        usage.begin(1, 0.5)
    assert refused.value.retry_after_s == 2
    usage.begin(1, 2.0)


def test_prompt_over_the_token_budget_delays_the_next_request_until_refilled():
    usage = KeyUsage({"default": KeyLimit(tokens_per_minute=60)}).of("k")
    usage.begin(1000, 0.0)
    with pytest.raises(RateLimited) as refused:
        usage.begin(1, 0.0)
    assert refused.value.retry_after_s == 941


def test_rejected_request_uses_no_budget():
    usage = KeyUsage({"default": KeyLimit(requests_per_minute=1, tokens_per_minute=60)}).of("k")
    usage.begin(50, 0.0)
    for _ in range(5):
        with pytest.raises(RateLimited):
            usage.begin(20, 30.0)
    usage.begin(20, 60.0)
    assert usage.num_in_flight == 2


def test_concurrent_requests_of_a_key_are_bounded():
    usage = KeyUsage({"default": KeyLimit(requests_in_flight=1)}).of("k")
    usage.begin(1, 0.0)
    for start in (usage.check, usage.begin):
        with pytest.raises(RateLimited):
            start(1, 0.0)
    usage.finish()
    usage.check(1, 0.0)
    usage.begin(1, 0.0)


def test_keys_without_limits_are_not_tracked():
    keys = KeyUsage({"0a1b2c3d": KeyLimit(requests_in_flight=1)})
    assert keys.of("ffffffff") is None
    assert keys.of("") is None
    assert keys.of("0a1b2c3d") is keys.of("0a1b2c3d") is not None


def test_file_of_limits_applies_to_used_keys_and_keeps_their_usage(tmp_path):
    keys = KeyUsage({"default": KeyLimit(requests_in_flight=1)})
    keys.of("k").begin(1, 0.0)
    keys.load(written(tmp_path, "[default]\nrequests_in_flight = 2"))
    keys.of("k").begin(1, 0.0)
    with pytest.raises(RateLimited, match="has 2 requests in flight; its limit is 2"):
        keys.of("k").begin(1, 0.0)


def workers_of(limit: KeyLimit, directory, num_workers: int) -> list[KeyUsage]:
    limits = {"default": limit}
    return [KeyUsage(limits, str(directory), index, num_workers) for index in range(num_workers)]


def test_requests_in_flight_are_limited_over_all_edge_workers(tmp_path):
    first, second = workers_of(KeyLimit(requests_in_flight=2), tmp_path, 2)
    first.of("k").begin(1, 0.0)
    first.of("k").begin(1, 0.0)
    second.of("other").begin(1, 0.0)
    with pytest.raises(RateLimited):
        second.of("k").begin(1, 0.0)
    first.of("k").finish()
    second.of("k").begin(1, 0.0)


@pytest.mark.parametrize("killed", [0, 1])
def test_requests_of_a_killed_edge_worker_are_no_longer_in_flight(tmp_path, killed):
    limit = KeyLimit(requests_in_flight=2, requests_per_minute=60)
    workers = workers_of(limit, tmp_path, 2)
    for worker in workers:
        worker.of("k").begin(1, 0.0)
    release_requests(str(tmp_path), killed)
    other, successor = workers[1 - killed], workers_of(limit, tmp_path, 2)[killed]
    assert other.of("k").num_in_flight == 1
    successor.of("k").begin(1, 0.0)
    # What the killed worker used of the minute stays used.
    with pytest.raises(RateLimited, match="in flight"):
        other.of("k").begin(1, 0.0)
    successor.of("k").finish()
    for _ in range(57):
        successor.of("k").begin(1, 0.0)
        successor.of("k").finish()
    with pytest.raises(RateLimited, match="requests per minute"):
        other.of("k").begin(1, 0.0)


# Seconds since the last step, the worker, and the tokens of a prompt, or of an answer if negative.
STEPS = st.lists(
    st.tuples(st.sampled_from((0.0, 0.5, 7.0, 90.0)), st.integers(0, 2), st.integers(-90, 90))
)


@given(STEPS)
# The sums of these differ by a rounding error, so that one is a whole number of seconds and the other just above it.
@example(
    [(90.0, 0, 67), (90.0, 0, 77), *[(0.0, 0, 1)] * 2, (0.0, 1, -80), (0.0, 0, -3), (0, 0, 23)]
)
def test_several_edge_workers_reject_what_one_would(steps):
    limit = KeyLimit(requests_per_minute=7, tokens_per_minute=100)
    with tempfile.TemporaryDirectory() as directory:
        several, now = workers_of(limit, directory, 3), 1000.0
        alone = KeyUsage({"default": limit}).of("k")
        for elapsed_s, index, num_tokens in steps:
            now += elapsed_s
            outcomes = []
            for state in (alone, several[index].of("k")):
                try:
                    if num_tokens < 0:
                        state.count_output(-num_tokens, now)
                    else:
                        state.begin(num_tokens, now)
                except RateLimited as error:
                    outcomes.append((error.message, error.retry_after_s))
                else:
                    outcomes.append(None)
            assert outcomes[0] == outcomes[1]


def key_users(directory, stack: ExitStack) -> list[subprocess.Popen[str]]:
    """Start the workers of `key_user`, and return them when each is ready to begin."""
    users = [
        stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "tests.router.key_user", str(directory), str(index)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        for index in range(key_user.NUM_WORKERS)
    ]
    for user in users:
        stack.callback(user.kill)
        assert user.stdout.readline() == "ready\n"
    return users


def test_limits_are_exact_while_edge_workers_start_requests_at_the_same_moment(tmp_path):
    limit = key_user.LIMIT
    with ExitStack() as stack:
        users = key_users(tmp_path, stack)
        for user in users:
            user.stdin.write("\n")
            user.stdin.flush()
        results = [[int(number) for number in user.stdout.readline().split()] for user in users]
    assert [num_above for _, num_above in results] == [0, 0]
    num_started = sum(num_started for num_started, _ in results)
    assert num_started == limit.requests_per_minute
    keys = key_user.keys(str(tmp_path), 0)
    keys.limits = {"default": KeyLimit(tokens_per_minute=limit.tokens_per_minute)}
    used = num_started * (key_user.PROMPT_TOKENS + key_user.OUTPUT_TOKENS)
    left = limit.tokens_per_minute - used
    keys.of("k").check(left, key_user.NOW_S)
    with pytest.raises(RateLimited, match="tokens per minute"):
        keys.of("k").check(left + 1, key_user.NOW_S)
