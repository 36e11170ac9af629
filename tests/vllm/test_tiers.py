"""Prompts from the tiers below vLLM's cache, without vLLM: a request waits, its blocks are placed, others are saved."""

import contextlib
from functools import partial

import numpy as np
import pytest

from tandem.kvtransfer.region import MemoryRegion
from tandem.node.config import TierConfig
from tandem.node.ranks.pool import Piece, pool_pages
from tandem.node.tiers.tiers import open_stack
from tandem.vllm.tiers import PromptTiers
from tandem.vllm.worker import Results
from tandem.wire.channel import Waker
from tandem.wire.prefixes import PageSpace
from tests.patience import eventually

SIZE, NUM_BLOCKS, LAYER_BYTES = 4, 16, 4096
PROMPT = list(range(100, 100 + 5 * SIZE))
# Two layers, one after the other, as vLLM lays out its blocks.
PIECES = [Piece(layer * NUM_BLOCKS * LAYER_BYTES, LAYER_BYTES, LAYER_BYTES) for layer in range(2)]


class Node:
    """A pool of blocks with tiers."""

    def __init__(self, *specs, min_tokens=1):
        self.region = MemoryRegion.private(2 * NUM_BLOCKS * LAYER_BYTES)
        self.blocks = self.region.array().reshape(2, NUM_BLOCKS, LAYER_BYTES)
        self.waker, self.results = Waker(), Results()
        space = PageSpace("model", "bytes", SIZE)
        pages = pool_pages(self.region, PIECES)
        config = TierConfig(specs=specs or ("host:1MiB",), timeout_s=30)
        self.tiers = PromptTiers(
            partial(open_stack, config, pages, space), space, min_tokens, self.waker
        )

    def poll(self):
        new = self.tiers.results(())
        for name in ("sent", "received", "failed"):
            getattr(self.results, name).update(getattr(new, name))

    def wait_for(self, is_done):
        assert eventually(is_done, self.poll)

    def num_stored(self):
        return self.tiers.stack.loads()[0].num_pages

    def save(self, request_id, token_ids, page_ids, num_new=None):
        expected = self.num_stored() + (len(page_ids) if num_new is None else num_new)
        assert self.tiers.finish(request_id, token_ids, "", page_ids, is_held=False)
        self.wait_for(lambda: request_id in self.results.sent and self.num_stored() == expected)

    def search(self, request_id, token_ids, num_computed=0, scope=""):
        """Return how many tokens the tiers have."""
        found = []

        def is_known():
            found[:] = [self.tiers.num_external(request_id, token_ids, scope, num_computed)]
            return found != [None]

        self.wait_for(is_known)
        return found[0]

    def close(self):
        self.tiers.close()
        self.waker.close()
        self.region.close()


@pytest.fixture
def node():
    with contextlib.closing(Node()) as node:
        yield node


def test_saved_blocks_come_back_in_other_places(node):
    node.blocks[:, 1:5] = np.arange(4)[:, None] + [[[10]], [[20]]]
    node.save("a", PROMPT[: 4 * SIZE], [1, 2, 3, 4])
    node.blocks[:] = 0
    assert node.search("b", PROMPT) == 4 * SIZE
    node.tiers.place("b", [9, 8, 7, 6, 5])
    node.wait_for(lambda: node.results.received == {"b"})
    assert node.results.failed == set()
    assert node.blocks[:, :, 0].tolist() == [
        [0] * 6 + [13, 12, 11, 10] + [0] * 6,
        [0] * 6 + [23, 22, 21, 20] + [0] * 6,
    ]


def test_last_token_is_left_to_compute(node):
    node.save("a", PROMPT, [1, 2, 3, 4, 5])
    assert node.search("b", PROMPT) == 4 * SIZE
    assert node.search("c", [*PROMPT, 7]) == 5 * SIZE


def test_tokens_that_vllm_has_cached_are_not_searched(node):
    node.save("a", PROMPT, [1, 2, 3, 4, 5])
    assert node.search("b", [*PROMPT, 7], num_computed=2 * SIZE) == 3 * SIZE
    node.tiers.place("b", [0, 0, 9, 8, 7, 6])
    node.wait_for(lambda: node.results.received == {"b"})


@pytest.mark.parametrize(
    ("token_ids", "scope"), [([1, *PROMPT[1:]], ""), (PROMPT, "another tenant")]
)
def test_other_prefixes_and_tenants_find_nothing(node, token_ids, scope):
    node.save("a", PROMPT, [1, 2, 3, 4, 5])
    assert node.search("b", token_ids, scope=scope) == 0


def test_short_prompts_are_not_searched():
    with contextlib.closing(Node(min_tokens=5 * SIZE)) as node:
        assert node.tiers.num_external("a", PROMPT, "", 0) == 0
        assert node.tiers.num_external("b", [*PROMPT, 7], "", 0) is None


def test_preempted_request_computes_what_it_had_loaded(node):
    node.save("a", PROMPT, [1, 2, 3, 4, 5])
    assert node.search("b", PROMPT) == 4 * SIZE
    node.tiers.place("b", [9, 8, 7, 6])
    node.wait_for(lambda: node.results.received == {"b"})
    assert node.tiers.num_external("b", PROMPT, "", 0) == 0


def test_blocks_are_free_once_saved_and_handed_off(node):
    assert node.tiers.finish("a", PROMPT, "", [1, 2, 3, 4, 5], is_held=True)
    node.wait_for(lambda: node.num_stored() == 5)
    assert node.results.sent == set()
    assert node.tiers.results({"a"}).sent == {"a"}


def test_blocks_without_a_save_are_free_after_the_hand_off(node):
    assert node.tiers.finish("a", PROMPT[:3], "", [1], is_held=True)
    assert node.tiers.results({"a"}).sent == {"a"}
    assert not node.tiers.finish("b", PROMPT[:3], "", [1], is_held=False)


def test_request_that_ends_during_its_search_leaves_nothing(node):
    node.save("a", PROMPT, [1, 2, 3, 4, 5])
    assert node.tiers.num_external("b", PROMPT, "", 0) is None
    assert not node.tiers.finish("b", (), "", [], is_held=False)
    assert node.search("b", PROMPT) == 4 * SIZE


def test_blocks_from_prefill_are_not_saved_again(node):
    node.tiers.skip("a", 4 * SIZE)
    node.save("a", PROMPT, [1, 2, 3, 4, 5], num_new=1)


def test_damaged_blocks_are_computed(tmp_path):
    spec = f"disk:{tmp_path}:1MiB"
    with contextlib.closing(Node(spec)) as node:
        node.save("a", PROMPT, [1, 2, 3, 4, 5])
    for file in tmp_path.rglob("*"):
        # Some ids are no ids after the change, and a damaged id is refused.
        if file.is_file() and file.stat().st_size and file.name != "store-id":
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
    with contextlib.closing(Node(spec)) as node:
        assert node.search("b", PROMPT) == 0


def test_restarted_node_finds_what_it_has_saved(tmp_path):
    spec = f"disk:{tmp_path}:1MiB"
    with contextlib.closing(Node(spec)) as node:
        node.save("a", PROMPT, [1, 2, 3, 4, 5])
    with contextlib.closing(Node(spec)) as node:
        assert node.search("b", PROMPT) == 4 * SIZE
