"""An engine whose forwards take the time of a known profile, on a clock that nobody waits for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.config import EngineConfig
from tandem.engine.core import Engine
from tandem.engine.profile import DecodeTimes, PrefillTimes, Profile
from tandem.engine.shape import ModelShape
from tandem.engine.simulated import Clock, SimulatedLauncher
from tandem.profile.measuring import Bench, Grid, fit_decode, fit_prefill

PAGE, NUM_PAGES = 16, 700
TRUE = Profile(
    prefill=PrefillTimes(
        base_ms=20, per_token_ms=1.5, per_context_token_ms=0.02, per_pair_ms=0.001
    ),
    decode=DecodeTimes(base_ms=40, per_request_ms=2, per_context_token_ms=0.01),
)
GRID = Grid(
    num_tokens=NUM_PAGES * PAGE,
    context_length=4096,
    page_size=PAGE,
    chunk=256,
    max_running=32,
    longest_context=4096,
)
ms = st.floats(0.001, 1000)


class FakeTime:
    def __init__(self):
        self.now_s = 0.0

    def now(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.fixture(params=[False, True], ids=["one after the other", "overlapped"])
def engine(request):
    shape = ModelShape(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=1000,
        context_length=4096,
        eos_token_ids=frozenset({0}),
        dtype="uint8",
        kv_dtype="uint8",
        fingerprint="f",
    )
    time = FakeTime()
    config = EngineConfig(
        model_dir="",
        page_size=PAGE,
        chunked_prefill_size=256,
        max_running_requests=32,
        is_overlapped=request.param,
    )
    launcher = SimulatedLauncher(TRUE, np.arange(1, 1000), 1, clock=Clock(time.now, time.sleep))
    return Engine(launcher, shape, config, num_pages=NUM_PAGES)


def test_measuring_over_the_grid_gives_the_profile_and_every_page_back(engine):
    bench = Bench(engine, point_s=0.3)
    chunks, chunks_error = fit_prefill({p: bench.prefill_s(p) for p in GRID.prefills()})
    steps, steps_error = fit_decode({p: bench.decode_s(p) for p in GRID.decodes()})
    assert chunks_error < 0.001
    assert steps_error < 0.01
    assert chunks.per_token_ms == pytest.approx(1.5, rel=0.01)
    assert chunks.per_pair_ms == pytest.approx(0.001, rel=0.05)
    assert steps.per_request_ms == pytest.approx(2, rel=0.05)
    assert steps.per_context_token_ms == pytest.approx(0.01, rel=0.05)
    assert bench.host_s
    engine.cache.flush()
    engine.cache.check_integrity()
    assert engine.counts().free == NUM_PAGES


@given(ms, st.floats(0.001, 10), st.floats(0, 1), st.floats(0, 0.01))
def test_times_that_are_exactly_so_are_found(base, token, context, pair):
    true = PrefillTimes(
        base_ms=base, per_token_ms=token, per_context_token_ms=context, per_pair_ms=pair
    )
    times, error = fit_prefill({p: true.forward_s(p.size, p.num_context) for p in GRID.prefills()})
    assert error < 1e-6
    assert times.forward_s(200, 1000) == pytest.approx(true.forward_s(200, 1000), rel=1e-3)


@given(st.lists(st.floats(0.001, 10), min_size=10, max_size=10))
def test_no_part_takes_less_than_no_time_whatever_was_measured(seconds):
    times, error = fit_decode(dict(zip(GRID.decodes(), seconds, strict=False)))
    assert min(times.base_ms, times.per_request_ms, times.per_context_token_ms) >= 0
    assert error >= 0


@given(
    num_tokens=st.integers(256, 10**6),
    context_length=st.integers(64, 131_072),
    page_size=st.sampled_from([1, 16, 64]),
    chunk=st.integers(1, 8192),
    max_running=st.integers(1, 512),
    longest_context=st.integers(1, 32768),
    is_quick=st.booleans(),
)
def test_every_point_fits_the_pool_and_the_engine(**bounds):
    grid = Grid(**bounds)
    chunks, steps = grid.prefills(), grid.decodes()
    assert len(chunks) == len(set(chunks)) > 0
    for chunk in chunks:
        assert 0 < chunk.size <= grid.chunk
        assert chunk.num_context % grid.page_size == 0
        assert chunk.num_context <= grid.longest_context
        assert chunk.size + chunk.num_context < min(grid.context_length, grid.num_tokens)
    assert len(steps) == len(set(steps))
    for step in steps:
        assert 1 <= step.size <= grid.max_running
        assert step.size * step.num_context < grid.num_tokens
        assert step.num_context < grid.context_length
