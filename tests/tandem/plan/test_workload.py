import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.trace import TraceRow
from tandem.plan.lengths import Lengths, read_lengths
from tandem.plan.seam import BLOCK_TOKENS, PlannedRequest
from tandem.plan.workload import Drawn, draw, facts_of, replay, uncached, without_too_long
from tandem.wire.errors import ConfigInvalid

ROWS = [
    TraceRow(27482, 6955, 52, [46, 47, 48]),
    TraceRow(30482, 1024, 26, [46, 47, 99]),
    TraceRow(33482, 100, 5, [7]),
]


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("4000", Lengths("fixed", 4000, 4000)),
        ("uniform:500:4000", Lengths("uniform", 500, 4000)),
        ("lognormal:1200:8000", Lengths("lognormal", 1200, 8000)),
    ],
)
def test_lengths_are_read_as_people_say_them(text, lengths):
    assert read_lengths(text, "--prompt") == lengths


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-5",
        "many",
        "uniform:5",
        "uniform:9:5",
        "normal:1:2",
        "1:2",
        "lognormal:1:2:3",
        "lognormal:0:5",
    ],
)
def test_what_is_no_length_is_refused_with_examples(text):
    with pytest.raises(ConfigInvalid, match=r"--prompt .*lognormal:1200:8000"):
        read_lengths(text, "--prompt")


def test_drawn_lengths_have_the_percentiles_that_were_asked_for():
    drawn = Lengths("lognormal", 1200, 8000).draw(np.random.default_rng(0), 40_000)
    assert np.percentile(drawn, 50) == pytest.approx(1200, rel=0.03)
    assert np.percentile(drawn, 99) == pytest.approx(8000, rel=0.06)
    even = Lengths("uniform", 5, 9).draw(np.random.default_rng(0), 1000)
    assert set(even) == {5, 6, 7, 8, 9}


def load(**settings):
    given = {"prompt": Lengths("fixed", 700, 700), "output": Lengths("fixed", 100, 100)}
    return Drawn(**{"rate": 5.0, "duration_s": 100.0} | given | settings)


def test_a_drawn_load_has_its_rate_and_is_the_same_for_the_same_seed():
    requests = draw(load())
    assert facts_of(requests).rate == pytest.approx(5.0, rel=0.15)
    assert requests == draw(load())
    assert requests != draw(load(seed=1))
    assert [r.arrival_s for r in requests] == sorted(r.arrival_s for r in requests)
    assert not any(r.blocks for r in requests)


def test_a_system_prompt_is_the_same_blocks_in_each_conversation_that_has_it():
    requests = draw(load(system_tokens=1024, num_systems=3))
    assert {tuple(r.blocks) for r in requests} == {(0, 1), (2, 3), (4, 5)}
    assert {r.num_prompt for r in requests} == {1024 + 700}
    facts = facts_of(requests)
    assert facts.num_uncached == facts.num_prompt - (facts.num_requests - 3) * 1024


@pytest.mark.parametrize("system", [100, 700, 1024])
def test_every_token_of_a_system_prompt_counts_and_its_whole_blocks_are_shared(system):
    requests = draw(load(system_tokens=system, prompt=Lengths("fixed", 50, 50)))
    assert {request.num_prompt for request in requests} == {system + 50}
    assert {len(request.blocks) for request in requests} == {system // BLOCK_TOKENS}


@given(
    turns=st.integers(1, 5),
    prompt=st.integers(1, 3000),
    output=st.integers(1, 2000),
    system=st.integers(0, 3000),
)
def test_each_turn_begins_with_all_that_was_said_before(turns, prompt, output, system):
    requests = draw(
        load(
            turns=turns,
            prompt=Lengths("fixed", prompt, prompt),
            output=Lengths("fixed", output, output),
            system_tokens=system,
            duration_s=20.0,
        )
    )
    by_session = itertools.groupby(sorted(requests, key=lambda r: r.session), lambda r: r.session)
    for session, turns_of in by_session if turns > 1 else ():
        said = list(turns_of)
        assert session
        for before, after in itertools.pairwise(said):
            assert after.num_prompt == before.num_prompt + before.num_output + prompt
            assert list(after.blocks[: len(before.blocks)]) == list(before.blocks)
            assert after.arrival_s > before.arrival_s
            assert len(after.blocks) == after.num_prompt // BLOCK_TOKENS
    shared = system // BLOCK_TOKENS
    own = [block for r in requests for block in set(r.blocks[shared:])]
    assert len({r.session for r in requests}) == 1 or len(own) >= len(set(own))


def test_conversations_share_nothing_but_the_system_prompt():
    requests = draw(load(turns=3, prompt=Lengths("fixed", 2000, 2000), system_tokens=512))
    blocks = {}
    for request in requests:
        blocks.setdefault(request.session, set()).update(request.blocks)
    for one, other in itertools.combinations(blocks.values(), 2):
        assert one & other == {0}


def test_a_trace_is_replayed_in_its_times_with_whole_blocks():
    requests = replay(ROWS)
    assert [r.arrival_s for r in requests] == [0.0, 3.0, 6.0]
    assert [list(r.blocks) for r in requests] == [[46, 47, 48], [46, 47], []]
    assert [(r.num_prompt, r.num_output) for r in requests] == [(6955, 52), (1024, 26), (100, 5)]
    assert uncached(requests) == [6955, 1, 100]


def test_a_trace_is_scaled_stretched_to_a_rate_and_cut():
    assert [r.arrival_s for r in replay(ROWS, scale=2.0)] == [0.0, 1.5, 3.0]
    assert [r.arrival_s for r in replay(ROWS, rate=1.0)] == pytest.approx([0.0, 1.5, 3.0])
    assert len(replay(ROWS, duration_s=3.0)) == 2


def test_what_no_node_holds_is_left_out_and_counted():
    requests = [PlannedRequest(arrival_s=0.0, num_prompt=n, num_output=10) for n in (90, 91, 5)]
    kept, num_left_out = without_too_long(requests, 100)
    assert ([r.num_prompt for r in kept], num_left_out) == ([90, 5], 1)
