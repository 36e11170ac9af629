"""A rank's tiers answer rank 0 while its loop computes, and end with it."""

import threading
from collections import deque

import numpy as np
import pytest

from tandem.kvtier.stack import CLOSE_S
from tandem.node import rank as rank_process
from tandem.node.rank_messages import FetchedHere, FetchPages, SavedHere, SavePages, TiersHere
from tandem.node.rank_tiers import RankTiers, RankTiersThread
from tandem.node.ranks import STOP_TIMEOUT_S
from tandem.wire.channel import Waker
from tandem.wire.errors import PeerLost
from tandem.wire.page_keys import shard_key
from tests.node.tier_rig import ScriptedStack
from tests.patience import PATIENCE_S

DIGEST = bytes(32)


class NotedStack(ScriptedStack):
    """Says when it was asked something."""

    def __init__(self):
        super().__init__(np.zeros((4, 4)))
        self.asked, self.is_closed = threading.Semaphore(0), False

    def fetch(self, number, keys):
        super().fetch(number, keys)
        self.asked.release()

    def save(self, number, keys, page_ids):
        is_begun = super().save(number, keys, page_ids)
        self.asked.release()
        return is_begun

    def close(self):
        self.is_closed = True


class Rank:
    """A rank whose loop does nothing, over a stack that is scripted."""

    def __init__(self):
        self.stack, self.waker = NotedStack(), Waker()
        self.said, self._heard = deque(), threading.Condition()
        self.is_rank_0_gone, self.refused = False, threading.Semaphore(0)
        self.thread = RankTiersThread(RankTiers(self.stack, "1/2"), self.waker, self._send)

    def answer(self, kind):
        """Have the stack answer, and return what rank 0 hears of it."""
        self.stack.answer_all()
        self.waker.wake()
        with self._heard:
            assert self._heard.wait_for(lambda: self._take(kind), PATIENCE_S)
        return self.last

    def ask(self, message):
        """Have the rank told something, and wait until its stack was."""
        self.thread.do(message)
        assert self.stack.asked.acquire(timeout=PATIENCE_S)

    def _take(self, kind):
        while self.said:
            self.last = self.said.popleft()
            if isinstance(self.last, kind):
                return True
        return False

    def _send(self, message):
        if self.is_rank_0_gone:
            self.refused.release()
            raise PeerLost("the process at the other end is gone")
        with self._heard:
            self.said.append(message)
            self._heard.notify_all()


@pytest.fixture
def rank():
    rank = Rank()
    yield rank
    rank.thread.close()
    assert rank.stack.is_closed


def test_what_tiers_bring_is_told_without_the_loop(rank):
    rank.ask(FetchPages(number=1, digests=[DIGEST]))
    assert rank.answer(FetchedHere) == FetchedHere(number=1, num_pages=0, by_tier={})
    rank.ask(SavePages(number=2, digests=[DIGEST], page_ids=[3]))
    assert rank.answer(SavedHere) == SavedHere(number=2)
    assert list(rank.stack.content) == [shard_key(DIGEST, "1/2")]


def test_what_tiers_hold_is_told_first(rank):
    assert [load.name for load in rank.answer(TiersHere).loads] == ["host"]


def test_a_rank_whose_rank_0_is_gone_ends_in_order(rank):
    rank.answer(TiersHere)  # else that may be what nobody hears, and the save is never begun
    rank.ask(SavePages(number=2, digests=[DIGEST], page_ids=[3]))
    rank.is_rank_0_gone = True
    rank.stack.answer_all()
    rank.waker.wake()
    assert rank.refused.acquire(timeout=PATIENCE_S)
    rank.thread.close()
    assert rank.stack.is_closed


def test_a_rank_whose_tiers_hang_has_time_left_to_give_back_its_memory():
    # A stack waits that long for calls, and then for tiers to close.
    assert 2 * CLOSE_S < rank_process._END_TIMEOUT_S < STOP_TIMEOUT_S
