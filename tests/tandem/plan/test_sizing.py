"""Loads, and how many nodes they take."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.workload import TraceRow
from tandem.engine.profile import DecodeTimes, NodeFigures, PrefillTimes, Profile
from tandem.plan.load import Load, draw, draw_lengths, replay
from tandem.plan.nodes import NodeKind
from tandem.plan.sizing import Goals, size_decode, size_prefill
from tandem.wire.errors import ConfigInvalid

GOALS = Goals(ttft_s=1.0, itl_s=0.02)
ROWS = [
    TraceRow(27482, 6955, 52, [46, 47, 48]),
    TraceRow(30482, 1024, 26, [46, 47, 99]),
    TraceRow(33482, 100, 5, [7]),
]


def kind(**figures):
    return NodeKind(
        name="plain",
        profile=Profile(
            prefill=PrefillTimes(base_ms=5, per_token_ms=0.1),
            decode=DecodeTimes(base_ms=10, per_request_ms=0.1),
            node=NodeFigures(**{"num_tokens": 10_000_000, "kv_bytes_per_token": 1000, **figures}),
        ),
        link_bytes_per_s=1e8,
        cost=1.0,
    )


def load(rate=20.0, prompt="2000", output="200", system_tokens=0):
    return Load(draw(prompt, output, rate=rate, system_tokens=system_tokens), 10**6)


# ── loads ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text",
    ["", "0", "-5", "many", "uniform:5", "uniform:9:5", "normal:1:2", "1:2", "lognormal:1:2:3"],
)
def test_what_is_no_length_is_refused_with_examples(text):
    with pytest.raises(ConfigInvalid, match=r"--prompt .*lognormal:1200:8000"):
        draw_lengths(text, "--prompt", np.random.default_rng(0), 1)


def test_drawn_lengths_have_the_percentiles_that_were_asked_for():
    def drawn(text):
        return draw_lengths(text, "--prompt", np.random.default_rng(0), 40_000)

    assert np.percentile(drawn("lognormal:1200:8000"), [50, 99]) == pytest.approx(
        [1200, 8000], rel=0.06
    )
    assert set(drawn("uniform:5:9")) == {5, 6, 7, 8, 9}
    assert set(drawn("4000")) == {4000}


def test_a_drawn_load_has_its_rate_and_shares_whole_blocks_of_the_system_prompt():
    found = load(system_tokens=1100)
    assert found.rate == pytest.approx(20, rel=0.1)
    assert set(found.prompts.tolist()) == {3100}
    assert found.new.tolist() == [3100] + [3100 - 1024] * (len(found.rows) - 1)
    assert found.rows == load(system_tokens=1100).rows


def test_a_trace_is_replayed_in_its_times_or_stretched_to_a_rate():
    found = Load(replay(ROWS, 0.0), 10**6)
    assert found.arrivals_s.tolist() == [0.0, 3.0, 6.0]
    assert found.new.tolist() == [6955, 1, 100]
    assert [row.timestamp for row in replay(ROWS, 1.0)] == pytest.approx([0, 1500, 3000])


def test_requests_that_no_node_holds_are_left_out_and_counted():
    found = Load(ROWS, 2000)
    assert (len(found.rows), found.num_too_long) == (2, 1)
    with pytest.raises(ConfigInvalid, match="no request of the load fits a node"):
        Load(ROWS, 100)


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────


def test_prefills_are_as_many_as_the_work_takes():
    # 20 prompts a second of 205 ms each.
    size = size_prefill(kind(), load(), GOALS)
    assert (size.num_nodes, size.reason) == (5, "computing prompts")
    assert size.busy == pytest.approx(20 * 0.205 / 5, rel=0.1)
    assert 0.205 < size.median_s < size.percentile_s <= 1.0


def test_a_tighter_goal_takes_more_prefills_and_an_unreachable_one_has_a_reason():
    tight = size_prefill(kind(), load(), Goals(ttft_s=0.25, itl_s=None))
    assert tight.num_nodes > 5
    assert tight.reason == "the TTFT goal"
    none = size_prefill(kind(), load(), Goals(ttft_s=0.2, itl_s=None))
    assert none.num_nodes == 0
    assert "takes 0.211 s on an idle node, over the goal of 200 ms" in none.reason


def test_a_slow_link_takes_more_prefills():
    # A prompt has 100 MB of KV, a second of the link.
    size = size_prefill(kind(kv_bytes_per_token=50_000), load(), Goals(ttft_s=None, itl_s=0.02))
    assert (size.num_nodes, size.reason) == (24, "sending KV")


def test_prompts_that_are_cached_are_no_work():
    assert size_prefill(kind(), load(prompt="100", system_tokens=10_240), GOALS).num_nodes == 1


def test_decodes_are_bound_by_pace_batch_or_pool():
    # 4,000 tokens a second; a step of 100 answers takes 20 ms, which makes 5,000.
    pace = size_decode(kind(), load(), GOALS)
    assert (pace.num_nodes, pace.reason) == (1, "the ITL goal")
    assert size_decode(kind(), load(40.0), GOALS).num_nodes == 2
    assert pace.median_s < pace.percentile_s <= 0.02
    few = size_decode(kind(max_running_requests=8), load(), GOALS)
    assert (few.num_nodes, few.reason) == (12, "--max-running-requests")
    small = size_decode(kind(num_tokens=2100 * 10), load(), GOALS)
    assert (small.num_nodes, small.reason) == (10, "the KV pool")


def test_a_step_that_is_too_long_for_one_answer_has_a_reason():
    size = size_decode(kind(), load(), Goals(ttft_s=1.0, itl_s=0.009))
    assert size.num_nodes == 0
    assert "a step takes 10.1 ms for a single answer, over the goal of 9 ms" in size.reason


def test_a_loop_that_does_not_overlap_is_part_of_a_step():
    slow = kind(host_step_ms=3, is_overlapped=False)
    assert size_decode(slow, load(), GOALS).num_nodes > size_decode(kind(), load(), GOALS).num_nodes


@given(
    rate=st.floats(0.1, 200),
    prompt=st.integers(1, 5000),
    output=st.integers(1, 500),
    num_tokens=st.integers(1000, 10**6),
    ttft_s=st.none() | st.floats(0.01, 10),
    itl_s=st.none() | st.floats(0.001, 1),
    percentile=st.floats(50, 100),
)
def test_every_size_keeps_its_goals_or_has_none(
    rate, prompt, output, num_tokens, ttft_s, itl_s, percentile
):
    asked = load(rate, str(prompt), str(output))
    goals = Goals(ttft_s=ttft_s, itl_s=itl_s, percentile=percentile)
    for size, goal_s in (
        (size_prefill(kind(num_tokens=num_tokens), asked, goals), ttft_s),
        (size_decode(kind(num_tokens=num_tokens), asked, goals), itl_s),
    ):
        assert size.reason
        if size.num_nodes and goal_s is not None:
            assert size.percentile_s <= goal_s * 1.0001
