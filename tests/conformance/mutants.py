"""Seeded faults: each is a patch that breaks a node or transport, and names the tests that must catch it."""

import msgspec
import pytest

from tandem.kvtransfer.agents.control import HeartbeatSchedule
from tandem.wire.channel import Codec
from tandem.wire.errors import MessageInvalid, PeerLost
from tests.conformance.agents import rhythm_of
from tests.conformance.played import PlayedHalf

# `pytest.raises` fails with an exception of its own where nothing was raised.
CAUGHT = (AssertionError, PeerLost, pytest.fail.Exception)


def cases(mutants):
    """Return the name of a test and the patch that it has to catch, as parameters.

    Args:
        mutants: By name, the tests (their names without `test_`, separated by spaces) and the patch.
    """
    return [
        pytest.param(f"test_{test}", patch, id=f"{name}-{test}")
        for name, (tests, patch) in mutants.items()
        for test in tests.split()
    ]


def check_caught(suite, caught_by, patch, make_half, monkeypatch):
    """Run a test against a node that is broken once its half has started; it has to fail."""
    test = vars(suite)[caught_by]
    rhythm = rhythm_of(test)
    monkeypatch.setattr(PlayedHalf, "patience_s", 1.5 if rhythm else 0.3)
    half = make_half(rhythm)
    with monkeypatch.context() as broken:
        patch(broken)
        with pytest.raises(CAUGHT):
            test(half)


def check_complete(suite, mutants, *exempt):
    """Check that every test of a suite catches a mutant, but for these."""
    catching = {case.values[0] for case in cases(mutants)} | set(exempt)
    assert catching == {name for name in vars(suite) if name.startswith("test_")}


def replaces(place, name, other):
    """Return a patch: `other(honest, self, *args)` does the work of a method or function."""

    def apply(patch):
        honest = getattr(place, name)
        patch.setattr(place, name, lambda *args, **more: other(honest, *args, **more))

    return apply


def omits(place, name, result=None):
    """Return a patch: a method does nothing."""
    return replaces(place, name, lambda *_args, **_more: result)


# ── patches for both halves ──────────────────────────────────────────────────────────────────────


def takes_false_frames_for(message):
    """Return a patch: frames that are no message are taken for this one."""

    def decode(honest, self, frame):
        try:
            return honest(self, frame)
        except MessageInvalid:
            return message

    return replaces(Codec, "decode", decode)


def _decode_known(honest, self, frame):
    message = honest(self, frame)
    if msgspec.msgpack.decode(frame).keys() - {"type", *message.__struct_fields__}:
        raise MessageInvalid("a field that is not known")
    return message


takes_known_fields_only = replaces(Codec, "decode", _decode_known)
never_takes_silence_for_a_loss = omits(HeartbeatSchedule, "check")
