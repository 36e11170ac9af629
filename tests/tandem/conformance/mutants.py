"""Broken nodes and transports, each under the tests of a suite that have to catch it."""

import msgspec
import pytest

from tandem.conformance.play import Player
from tandem.kvtransfer.control import Rhythm
from tandem.wire.channel import Codec
from tandem.wire.errors import MessageInvalid, PeerLost

# `pytest.raises` fails with an exception of its own where nothing was raised.
CAUGHT = (AssertionError, PeerLost, pytest.fail.Exception)


class Mutants:
    """The mutants of one suite.

    Args:
        suite: A module of tests.
        rhythms: Of the tests that are about time: `silence`, which is a loss soon, or `pings`.

    Attributes:
        cases: The name of a test and the patch that it has to catch, as parameters.
    """

    def __init__(self, suite, rhythms=None):
        self._suite, self._rhythms, self.cases = suite, rhythms or {}, []
        self.tests = [name for name in vars(suite) if name.startswith("test_")]

    def of(self, *names):
        """Register a mutant under the tests each of which has to catch it."""

        def register(patch):
            self.cases += [pytest.param(f"test_{name}", patch, id=patch.__name__) for name in names]
            return patch

        return register

    def check_honest(self, name, make_player, monkeypatch):
        """Run a test against a node that is not broken."""
        monkeypatch.setattr(Player, "settle_s", 0.05)
        vars(self._suite)[name](make_player(self._rhythms.get(name, "")))

    def check_caught(self, caught_by, patch, make_player, monkeypatch):
        """Run a test against a node that is broken behind the start of its player; it has to fail."""
        rhythm = self._rhythms.get(caught_by, "")
        monkeypatch.setattr(Player, "patience_s", 1.5 if rhythm else 0.3)
        player = make_player(rhythm)
        with monkeypatch.context() as broken:
            patch(broken)
            with pytest.raises(CAUGHT):
                vars(self._suite)[caught_by](player)

    def check_complete(self, *exempt):
        """Check that every test catches a mutant, but for these."""
        assert {case.values[0] for case in self.cases} | set(exempt) == set(self.tests)


# ── mutants of both halves ───────────────────────────────────────────────────────────────────────


def takes_false_frames_for(message):
    """Return a patch: frames that are no message are taken for this one."""

    def takes_false_frames_for_messages(patch):
        honest = Codec.decode

        def decode(self, frame):
            try:
                return honest(self, frame)
            except MessageInvalid:
                return message

        patch.setattr(Codec, "decode", decode)

    return takes_false_frames_for_messages


def takes_known_fields_only(patch):
    honest = Codec.decode

    def decode(self, frame):
        message = honest(self, frame)
        if msgspec.msgpack.decode(frame).keys() - {"type", *message.__struct_fields__}:
            raise MessageInvalid("a field that is not known")
        return message

    patch.setattr(Codec, "decode", decode)


def never_takes_silence_for_a_loss(patch):
    patch.setattr(Rhythm, "check", lambda *_args: None)
