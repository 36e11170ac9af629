"""A node of two ranks with separate tiers: it finds pages that both have, and its answers stay right."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tandem.kvtier.stack import CLOSE_S
from tandem.node.process import rank_host as rank_process
from tandem.node.ranks.ranks import STOP_TIMEOUT_S
from tandem.node.tiers.tiers import TierGroup, load_of_node
from tandem.wire.messages import TierLoad
from tests.engine.toy_runner import ShardedToyRunner
from tests.node import test_tiering
from tests.node.test_tiering import Node, answers, prompt_of
from tests.node.tier_rig import FakeRank, ScriptedStack


class TwoRanks(Node):
    """A node whose tokens are split between the pages of two ranks."""

    def __init__(self, num_pages=64, **settings):
        super().__init__(num_pages, make_runner=ShardedToyRunner, **settings)

    def make_stacks(self, runner):
        return [ScriptedStack(shard) for shard in runner.shards]

    def tiers(self):
        self.rank = FakeRank(self.stacks[1])
        return TierGroup(self.stacks[0], self.stacks[0].reported, [self.rank])

    def tiers_work(self):
        self.rank.work()
        for stack in self.stacks:
            stack.answer_all()
        self.rank.work()


@pytest.fixture
def node():
    return TwoRanks()


def test_evicted_pages_return_from_both_ranks(node):
    prompt = prompt_of(41)
    node.compute(prompt)
    node.start("b", prompt)
    node.run()
    answers(node, "b", prompt)
    assert (node.told.cached["b"], node.told.by_tier["b"]) == (40, {"host": 40})


def test_only_pages_that_both_ranks_have_are_found(node):
    prompt = prompt_of(41)
    node.compute(prompt)
    content = node.stacks[1].content
    for digest in list(content)[6:]:
        del content[digest]
    node.start("b", prompt)
    node.run()
    answers(node, "b", prompt)
    assert node.told.cached["b"] == 24


def test_miss_on_one_rank_ends_the_fetch_immediately(node):
    prompt = prompt_of(41)
    node.compute(prompt)
    node.stacks[1].content.clear()
    node.start("b", prompt)
    node.rank.work()
    (number,) = node.stacks[1].looking
    node.stacks[1].answer_fetch(number)
    node.rank.work()
    node.turn()  # rank 0 is still searching
    assert not node.tiering.waiting
    assert not node.stacks[0].looking
    node.run()
    answers(node, "b", prompt)
    assert node.told.cached["b"] == 0


def test_silent_rank_delays_a_request_by_at_most_its_limit(node):
    prompt = prompt_of(41)
    node.compute(prompt)
    node.start("b", prompt)
    node.stacks[0].answer_all()
    node.turn()
    assert len(node.tiering.waiting) == 1
    node.clock.now_s += test_tiering.LIMIT_S
    node.turn()
    assert not node.tiering.waiting
    # The rank answers after the wait has ended.
    node.rank.work(1)
    node.stacks[1].answer_all()
    node.run()
    answers(node, "b", prompt)
    assert node.told.cached["b"] == 0


@pytest.mark.parametrize("broken", [0, 1])
def test_failed_copy_on_one_rank_is_a_miss(node, broken):
    prompt = prompt_of(41)
    node.compute(prompt)
    node.start("b", prompt)
    node.tiers_work()
    node.turn()
    node.rank.work()
    for rank, stack in enumerate(node.stacks):
        assert len(node.tiering.waiting) == 1  # until both are done
        (number,) = stack.placing
        stack.answer_place(number, is_whole=rank != broken)
        node.rank.work()
        node.role.poll()
    node.run()
    answers(node, "b", prompt)
    assert node.told.cached["b"] == 0


def test_pages_are_held_until_both_ranks_have_copied_them(node):
    node.start("a", prompt_of(41))
    while node.role.has_work or node.tiering.waiting:
        node.turn()
        node.rank.work()
        for stack in node.stacks:
            for number in list(stack.looking):
                stack.answer_fetch(number)
        node.rank.work()
    node.turn()
    node.rank.work()
    num_saving = node.engine.counts().held
    assert num_saving
    for number in list(node.stacks[0].saving):
        node.stacks[0].answer_save(number)
    node.turn()
    assert node.engine.counts().held == num_saving
    node.run()
    assert node.engine.counts().held == 0


def test_page_that_a_rank_could_not_save_is_a_miss_and_not_held(node):
    node.stacks[1].is_full = True
    prompt = prompt_of(20)
    node.start("a", prompt)
    for _ in range(20):
        node.turn()
        node.tiers_work()
    assert (node.engine.cache.num_unsaved, node.engine.counts().held) == (0, 0)
    assert [len(stack.content) for stack in node.stacks] == [5, 0]
    node.forget()
    node.start("b", prompt)
    node.run()
    answers(node, "b", prompt)
    assert node.told.cached["b"] == 0


@pytest.mark.parametrize(
    ("store", "limit", "num_parts"), [("", 500, 2), ("", 0, 1), ("dir-1", 500, 1)]
)
def test_tier_load_is_summed_unless_each_rank_sees_the_whole_store(store, limit, num_parts):
    load = TierLoad(
        name="t", store=store, num_pages=3, num_bytes=300, limit_bytes=limit, put_bytes=10
    )
    whole = load_of_node(load, num_ranks=2)
    assert (whole.num_pages, whole.num_bytes) == (3 * num_parts, 300 * num_parts)
    assert whole.put_bytes == 20
    assert whole.limit_bytes == num_parts * limit


def test_rank_with_hanging_tiers_has_time_to_release_memory():
    # A stack waits `CLOSE_S` for calls, and again for tiers to close.
    assert 2 * CLOSE_S < rank_process.END_TIMEOUT_S < STOP_TIMEOUT_S


class AnyOrder(test_tiering.AnyOrder):
    """As with one rank, plus a second rank whose calls and events are delayed."""

    def make_node(self):
        return TwoRanks(num_pages=20, max_running_requests=4)

    @rule(num=st.integers(1, 4))
    def rank_works(self, num):
        self.node.rank.work(num)

    # Reached only after many random steps: pages that both ranks have, and copies in progress.

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def ask_again(self, data):
        self.node.run()
        self.node.role.flush_cache()
        name = str(len(self.prompts))
        self.prompts[name] = data.draw(st.sampled_from(list(self.prompts.values())))
        self.began[name] = self.node.clock.now_s
        self.node.start(name, self.prompts[name], num_new=6, salt="a")

    @rule()
    def found(self):
        self.node.rank.work()
        for stack in self.node.stacks:
            for number in list(stack.looking):
                stack.answer_fetch(number)
        self.node.rank.work()
        self.node.turn()
        self.node.rank.work()

    @rule(are_whole=st.tuples(st.booleans(), st.booleans()))
    def placed(self, are_whole):
        self.found()
        for stack, is_whole in zip(self.node.stacks, are_whole, strict=True):
            for number in list(stack.placing):
                stack.answer_place(number, is_whole=is_whole)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
