import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.profile import DecodeTimes, PrefillTimes
from tandem.profile.fitting import fit_decode, fit_prefill
from tandem.profile.grid import Room, decode_points, prefill_points

ROOM = Room(
    num_tokens=100_000,
    context_length=8192,
    page_size=16,
    chunk=512,
    max_running=256,
    longest_context=4096,
)
ms = st.floats(0.001, 1000)


@given(ms, st.floats(0.001, 10), st.floats(0, 1), st.floats(0, 0.01))
def test_times_that_are_exactly_so_are_found(base, token, context, pair):
    true = PrefillTimes(
        base_ms=base, per_token_ms=token, per_context_token_ms=context, per_pair_ms=pair
    )
    points = prefill_points(ROOM)
    fit = fit_prefill({p: true.forward_s(p.num_new, p.num_context) for p in points})
    assert fit.mean_error < 1e-6
    assert fit.times.forward_s(300, 1000) == pytest.approx(true.forward_s(300, 1000), rel=1e-4)


@given(ms, st.floats(0, 10), st.floats(0, 0.01))
def test_steps_that_are_exactly_so_are_found(base, request, context):
    true = DecodeTimes(base_ms=base, per_request_ms=request, per_context_token_ms=context)
    points = decode_points(ROOM)
    fit = fit_decode({p: true.forward_s(p.batch, p.batch * p.num_context) for p in points})
    assert fit.mean_error < 1e-6
    assert fit.times.forward_s(20, 9000) == pytest.approx(true.forward_s(20, 9000), rel=1e-4)


@given(st.lists(st.floats(0.001, 10), min_size=13, max_size=13))
def test_no_part_takes_less_than_no_time_whatever_was_measured(seconds):
    points = decode_points(ROOM)[: len(seconds)]
    times = fit_decode(dict(zip(points, seconds, strict=False))).times
    assert min(times.base_ms, times.per_request_ms, times.per_context_token_ms) >= 0


def test_what_no_such_times_describe_is_told_by_its_error():
    points = decode_points(ROOM)
    fit = fit_decode({p: 1.0 if p.batch % 8 else 0.1 for p in points})
    assert fit.mean_error > 0.3
    assert abs(fit.worst.error) == max(abs(each.error) for each in fit.points)


@given(
    num_tokens=st.integers(256, 10**6),
    context_length=st.integers(64, 131_072),
    page_size=st.sampled_from([1, 16, 64]),
    chunk=st.integers(1, 8192),
    max_running=st.integers(1, 512),
    longest_context=st.integers(1, 32768),
)
def test_every_point_fits_the_pool_and_the_engine(**bounds):
    room = Room(**bounds)
    for is_quick in (False, True):
        chunks, steps = (
            prefill_points(room, is_quick=is_quick),
            decode_points(room, is_quick=is_quick),
        )
        assert len(chunks) == len(set(chunks)) > 0
        for chunk in chunks:
            assert 0 < chunk.num_new <= room.chunk
            assert chunk.num_context % room.page_size == 0
            assert chunk.num_context <= room.longest_context
            assert chunk.num_new + chunk.num_context < min(room.context_length, room.num_tokens)
        assert len(steps) == len(set(steps))
        for step in steps:
            assert 1 <= step.batch <= room.max_running
            assert step.batch * step.num_context < room.num_tokens
            assert step.num_context < room.context_length
