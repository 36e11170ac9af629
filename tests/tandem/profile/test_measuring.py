"""An engine whose forwards take the time of a known profile, on a clock that nobody waits for."""

import numpy as np
import pytest

from tandem.engine.config import EngineConfig
from tandem.engine.core import Engine
from tandem.engine.profile import DecodeTimes, PrefillTimes, Profile
from tandem.engine.shape import ModelShape
from tandem.engine.simulated import Clock, SimulatedLauncher
from tandem.profile.fitting import fit_decode, fit_prefill
from tandem.profile.grid import DecodePoint, PrefillPoint, Room, decode_points, prefill_points
from tandem.profile.measuring import QUICK, Bench

PAGE = 16
TRUE = Profile(
    prefill=PrefillTimes(
        base_ms=20, per_token_ms=1.5, per_context_token_ms=0.02, per_pair_ms=0.001
    ),
    decode=DecodeTimes(base_ms=40, per_request_ms=2, per_context_token_ms=0.01),
)


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
    return Engine(launcher, shape, config, num_pages=700)


def test_a_chunk_is_measured_behind_a_context_that_nobody_computed(engine):
    bench = Bench(engine)
    for point in (PrefillPoint(100, 0), PrefillPoint(256, 1024), PrefillPoint(16, 3200)):
        expected_s = TRUE.prefill.forward_s(point.num_new, point.num_context)
        assert bench.prefill_s(point, QUICK) == pytest.approx(expected_s)


def test_a_step_is_measured_with_answers_that_landed(engine):
    bench = Bench(engine)
    for point in (DecodePoint(1, 512), DecodePoint(32, 256)):
        # Each step reads the token of the step before, too: a few of them are measured.
        expected_s = TRUE.decode.forward_s(point.batch, point.batch * point.num_context)
        assert bench.decode_s(point, QUICK) == pytest.approx(expected_s, rel=0.02)
    assert bench.host_s


def test_measuring_gives_every_page_back(engine):
    bench = Bench(engine)
    for _ in range(3):
        bench.decode_s(DecodePoint(32, 256), QUICK)
        bench.prefill_s(PrefillPoint(64, 2048), QUICK)
    engine.cache.flush()
    engine.cache.check_integrity()
    assert engine.counts().free == 700


def test_what_is_measured_over_the_grid_gives_the_profile_back(engine):
    bench = Bench(engine)
    room = Room(
        num_tokens=700 * PAGE,
        context_length=4096,
        page_size=PAGE,
        chunk=256,
        max_running=32,
        longest_context=4096,
    )
    chunks = fit_prefill({p: bench.prefill_s(p, QUICK) for p in prefill_points(room)})
    steps = fit_decode({p: bench.decode_s(p, QUICK) for p in decode_points(room)})
    assert chunks.mean_error < 0.001
    assert steps.mean_error < 0.01
    assert chunks.times.per_token_ms == pytest.approx(1.5, rel=0.01)
    assert chunks.times.per_pair_ms == pytest.approx(0.001, rel=0.05)
    assert steps.times.per_request_ms == pytest.approx(2, rel=0.05)
    assert steps.times.per_context_token_ms == pytest.approx(0.01, rel=0.05)
