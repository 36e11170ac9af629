from hypothesis import given
from hypothesis import strategies as st

from tandem.router.nodes.prefixes import NOTHING_CACHED, PrefixIndex, PromptBlocks
from tandem.router.pairing.policy import RoutingRequest
from tandem.wire.messages import CacheReport
from tandem.wire.prefixes import BLOCK_TOKENS, MAX_BLOCKS, PrefixJournal, block_names, pack_names
from tests.router.fake_node import request

EPOCH = 1


def report(journal: PrefixJournal, position: int) -> CacheReport | None:
    """What a node with this journal answers a ping."""
    changes = journal.since(position)
    return changes and CacheReport(
        epoch=EPOCH,
        position=changes.position,
        is_whole=changes.is_whole,
        added=pack_names(changes.added),
        removed=pack_names(changes.removed),
    )


@given(
    st.lists(st.one_of(st.tuples(st.booleans(), st.integers(0, 9)), st.just("ask")), max_size=60),
    st.integers(1, 12),
)
def test_router_that_polls_rarely_has_the_full_prefix_index(events, max_changes):
    """However many changes lie between two questions, more than the journal keeps included."""
    journal, known, cached = PrefixJournal(max_changes=max_changes), PrefixIndex().new_life(), set()
    for event in [*events, "ask"]:
        if event == "ask":
            if (told := report(journal, known.position)) is not None:
                known.take(told)
            assert known.names == cached
            assert known.num_blocks == len(cached)
            continue
        has_come, name = event
        if has_come and name not in cached:
            journal.add(name)
            cached.add(name)
        elif not has_come and name in cached:
            journal.remove(name)
            cached.remove(name)


def test_late_cache_reports_of_an_ended_node_are_dropped():
    index = PrefixIndex()
    known = index.new_life()
    known.forget()
    known.take(CacheReport(epoch=EPOCH, position=1, is_whole=True, added=pack_names([1, 2])))
    assert len(known.names) == len(index) == 0


def test_blocks_per_node_are_bounded():
    known = PrefixIndex().new_life()
    for start in (0, MAX_BLOCKS):
        names = pack_names(range(start, start + MAX_BLOCKS))
        known.take(CacheReport(epoch=EPOCH, position=1, added=names))
    assert len(known.names) == MAX_BLOCKS


def test_truncated_block_name_is_ignored():
    known = PrefixIndex().new_life()
    known.take(CacheReport(epoch=EPOCH, position=1, added=pack_names([7]) + b"abc"))
    assert known.names == {7}


@given(
    st.lists(st.lists(st.sets(st.integers(0, 6)), min_size=1, max_size=3), max_size=5),
    st.integers(0, 6),
)
def test_longest_prefix_per_node_is_found_as_nodes_start_and_end(lives, num_names):
    """Each node has what it told last; of every second one the life is over."""
    index, names = PrefixIndex(), list(range(num_names))
    known = [(index.new_life(), reports) for reports in lives]
    for life, reports in known:
        for told in reports:
            added = pack_names(sorted(told))
            life.take(CacheReport(epoch=EPOCH, position=1, is_whole=True, added=added))
    for life, _ in known[::2]:
        life.forget()
        life.forget()
    expected = {
        life: next((i for i in names if i not in reports[-1]), num_names)
        for life, reports in known[1::2]
    }
    assert index.leading(names) == {life: count for life, count in expected.items() if count}
    for life, _ in known[1::2]:
        life.forget()
    assert len(index) == 0


def test_prompts_share_blocks_up_to_the_first_different_token_per_salt():
    prompt = [i % 97 for i in range(4 * BLOCK_TOKENS)]
    other = [*prompt[: 2 * BLOCK_TOKENS], 98, *prompt[2 * BLOCK_TOKENS + 1 :]]
    names, others = block_names(prompt), block_names(other)
    assert len(set(names)) == 4
    assert [a == b for a, b in zip(names, others, strict=True)] == [True, True, False, False]
    assert not set(names) & set(block_names(prompt, "tenant"))


def test_prefix_lookup_uses_salt_and_adapter():
    prompt = [i % 97 for i in range(2 * BLOCK_TOKENS + 1)]
    for scope in ({}, {"adapter": "a"}, {"cache_salt": "a"}, {"adapter": "a", "cache_salt": "b"}):
        asked = request(prompt, **scope)
        names = list(RoutingRequest.of(asked).prompt.names)
        assert names == block_names(prompt, asked.prefix_scope)
        others = [
            block_names(prompt, other) for other in ("", "a", "b") if other != asked.prefix_scope
        ]
        assert not any(set(names) & set(other) for other in others)


def test_prompt_shorter_than_a_block_has_no_cached_prefix():
    prompt = PromptBlocks([1] * BLOCK_TOKENS)
    assert [prompt.cached_in(life) for life in (PrefixIndex().new_life(), NOTHING_CACHED)] == [0, 0]
    assert list(prompt.names) == []
