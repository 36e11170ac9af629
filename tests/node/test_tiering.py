"""Fetches and saves of `Tiering`, with a stack that answers in any order, late or never."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.decode.role import DecodeRole
from tandem.kvtier.guard import TierCost
from tandem.kvtier.stack import Fetched
from tandem.node.answers import Ticket
from tandem.node.tiers.tiering import Tiering
from tandem.node.tiers.tiers import SEARCH_SHARE
from tandem.wire.channel import Peer
from tandem.wire.errors import EngineFailed
from tandem.wire.generation import GenerateRequest, RequestId, SamplingParams
from tandem.wire.messages import StartColocated
from tests.engine.toy_runner import toy_answer, toy_engine
from tests.hand_off_rig import CollectedAnswers
from tests.loop_watch import few_bytecodes
from tests.node.tier_rig import ScriptedStack
from tests.patience import Clock

PAGE = 4
LIMIT_S = 1.0


class Node:
    """A colocated node over a toy engine and a scripted stack.

    Attributes:
        stacks: Of each rank.
    """

    def __init__(self, num_pages=64, *, saves_at_once=True, min_tokens=PAGE, **engine_settings):
        self.clock = Clock(100.0)
        self.engine, runner = toy_engine(num_pages, PAGE, has_tiers=True, **engine_settings)
        self.stacks = self.make_stacks(runner)
        self.stack = self.stacks[0]
        self.tiering = Tiering(
            self.engine,
            self.tiers(),
            timeout_s=LIMIT_S,
            min_tokens=min_tokens,
            saves_at_once=saves_at_once,
            clock=self.clock,
        )
        self.told = CollectedAnswers()
        self.role = DecodeRole(
            self.engine, None, self.told, 100, 100, tiering=self.tiering, clock=self.clock
        )

    def make_stacks(self, runner):
        return [ScriptedStack(runner.pages)]

    def tiers(self):
        """The tier group of the engine process."""
        return self.stack

    def tiers_work(self):
        """Answer all outstanding calls."""
        self.stack.answer_all()

    def ticket(self, name):
        return Ticket(Peer(b"edge"), RequestId(name), 0)

    def start(self, name, prompt, *, num_new=2, salt=""):
        request = GenerateRequest(
            request_id=RequestId(name),
            prompt_ids=list(prompt),
            sampling=SamplingParams(temperature=0, max_new_tokens=num_new, ignore_eos=True),
            cache_salt=salt,
        )
        self.role.start(self.ticket(name), StartColocated(request=request))

    def turn(self):
        self.role.poll()
        if self.role.has_work:
            self.role.step()

    def run(self):
        """Run until idle, with tiers that answer immediately."""
        for _ in range(400):
            self.turn()
            self.tiers_work()
            if not (self.role.has_work or self.tiering.waiting or self.is_moving()):
                self.role.poll()
                if not (self.role.has_work or self.is_moving()):
                    return
        raise AssertionError(f"not done: {self.tiering!r} {self.engine!r}")

    def is_moving(self):
        """Whether pages are copied from or to the pool."""
        return any(stack.saving or stack.placing for stack in self.stacks)

    def forget(self):
        """Drop the pages in the pool, but not those in tiers."""
        self.role.flush_cache()
        assert self.engine.counts().cached == 0

    def compute(self, prompt, name="a"):
        """Compute and save a prompt, then drop it from the pool."""
        self.start(name, prompt)
        self.run()
        self.forget()


@pytest.fixture
def node():
    return Node()


def prompt_of(num_tokens, seed=0):
    return [2 + (seed * 31 + i * 7) % 40 for i in range(num_tokens)]


def answers(node, name, prompt, num_new=2):
    assert node.told.tokens[name] == toy_answer(prompt, num_new)


def test_evicted_pages_return_from_a_tier_and_count_as_cached(node):
    prompt = prompt_of(41)
    node.compute(prompt)
    node.start("b", prompt)
    node.run()
    answers(node, "b", prompt)
    assert (node.told.cached["b"], node.told.by_tier["b"]) == (40, {"host": 40})
    assert node.told.phases["b"][0] == "kv_tier"
    assert node.told.by_tier["a"] == {}
    assert node.tiering.seconds().keys() == {"none", "host"}


LONG = prompt_of(8192 * PAGE + 1)


def test_keys_of_a_long_prompt_are_hashed_in_several_passes():
    node = Node(8200)
    for name in ("a", "b"):
        with few_bytecodes():
            node.start(name, LONG)
    num_passes = 0
    while not node.stack.looking:
        assert node.tiering.wait_s(1.0) == 0
        with few_bytecodes():
            node.turn()
        num_passes += 1
    assert num_passes > 1
    assert node.tiering.wait_s(LIMIT_S) == LIMIT_S  # the whole time is left for the search
    (keys,) = node.stack.looking.values()  # one fetch for both
    assert len(keys) == 8192


@pytest.mark.parametrize("end", ["cancel", "timeout"])
def test_fetch_that_ends_while_its_keys_are_hashed_does_not_reach_the_tiers(end):
    node = Node(8200, chunked_prefill_size=8192)
    node.start("a", LONG)
    if end == "cancel":
        node.role.cancel(node.ticket("a"))
    else:
        node.clock.now_s += LIMIT_S
    node.turn()
    assert not node.tiering.waiting
    assert node.tiering.wait_s(1.0) == 1.0
    assert not node.stack.looking
    assert not node.stack.cancelled
    assert (node.engine.num_running == 1) == (end == "timeout")


def test_only_pages_missing_on_the_device_are_fetched(node):
    prompt = prompt_of(41)
    node.compute(prompt)
    node.start("b", [*prompt[:20], 2])
    node.run()
    node.start("c", prompt)
    (keys,) = node.stack.looking.values()
    assert len(keys) == 5
    node.run()
    assert (node.told.cached["c"], node.told.by_tier["c"]) == (40, {"host": 20})


def test_nothing_is_fetched_with_a_different_salt(node):
    prompt = prompt_of(41)
    node.start("a", prompt, salt="one")
    node.run()
    node.forget()
    node.start("b", prompt, salt="two")
    node.run()
    node.start("c", prompt, salt="one")
    node.run()
    node.start("d", prompt)
    node.run()
    answers(node, "b", prompt)
    assert [node.told.by_tier[name] for name in "bcd"] == [{}, {"host": 40}, {}]
    assert [node.told.cached[name] for name in "bcd"] == [0, 40, 0]


def test_short_prompt_is_not_searched_in_tiers():
    node = Node(min_tokens=16)
    node.start("a", prompt_of(16))
    assert not node.stack.looking
    node.start("b", prompt_of(17, seed=1))  # the last token is computed in any case
    assert len(node.stack.looking) == 1


def test_generated_tokens_are_found_by_the_next_turn(node):
    prompt = prompt_of(20)
    node.start("a", prompt, num_new=21)
    node.run()
    node.forget()
    longer = prompt + toy_answer(prompt, 21)
    node.start("b", longer)
    node.run()
    answers(node, "b", longer)
    assert node.told.cached["b"] == 40


def test_request_waits_at_most_its_limit_for_a_silent_stack(node):
    prompt = prompt_of(41)
    node.start("a", prompt)
    assert node.tiering.wait_s(60) == pytest.approx(LIMIT_S)
    node.turn()
    assert not node.role.has_work
    node.clock.now_s += LIMIT_S
    assert node.tiering.wait_s(60) == 0
    node.run()
    answers(node, "a", prompt)
    assert not node.stack.fetched


def test_answer_delayed_by_a_long_step_is_used(node):
    prompt = prompt_of(41)
    node.compute(prompt)
    node.start("b", prompt)
    node.stack.answer_all()
    node.clock.now_s += 10 * LIMIT_S
    node.run()
    assert node.told.cached["b"] == 40


def test_slow_copy_is_not_waited_for_and_its_pages_stay_held(node):
    prompt = prompt_of(41)
    node.compute(prompt)
    node.start("b", prompt)
    node.stack.answer_all()
    node.turn()
    (number,) = node.stack.placing
    node.clock.now_s += 2 * (1 - SEARCH_SHARE) * LIMIT_S + LIMIT_S
    node.turn()
    assert node.role.has_work
    assert node.engine.counts().held >= 10
    for _ in range(20):
        node.turn()
    answers(node, "b", prompt)
    assert node.told.cached["b"] == 0
    node.stack.answer_place(number)
    node.run()
    assert node.engine.counts().held == 0


def test_pages_of_a_cancelled_request_are_held_until_written(node):
    prompt = prompt_of(41)
    node.compute(prompt)
    node.start("b", prompt)
    node.stack.answer_all()
    node.turn()
    node.role.cancel(node.ticket("b"))
    node.turn()
    assert node.engine.counts().held == 10
    assert node.engine.cache.allocate(60) is None
    node.stack.answer_all()
    node.turn()
    assert (node.engine.counts().held, node.engine.counts().cached) == (0, 10)


def test_requests_with_the_same_prefix_share_one_fetch(node):
    prompt = prompt_of(41)
    node.compute(prompt)
    for name in "bcd":
        node.start(name, prompt)
    assert len(node.stack.looking) == 1
    node.run()
    for name in "bcd":
        answers(node, name, prompt)
        assert node.told.cached[name] == 40


def test_pages_computed_during_the_search_are_shared():
    node = Node(min_tokens=24)
    prompt = prompt_of(41)
    node.compute(prompt)
    node.start("b", prompt)
    node.start("short", [*prompt[:20], 2])
    while "short" not in node.told.finishes:
        node.turn()
    node.run()
    answers(node, "b", prompt)
    assert node.told.cached["b"] == 40
    assert (node.engine.counts().held, node.engine.counts().cached) == (0, 10)


def test_request_short_of_pages_runs_when_a_save_ends():
    node = Node(num_pages=16)
    node.start("a", prompt_of(41))
    while node.role.has_work or node.tiering.waiting:
        node.turn()
        for number in list(node.stack.looking):
            node.stack.answer_fetch(number)
    node.turn()
    assert node.stack.saving
    prompt = prompt_of(60, seed=1)
    node.start("b", prompt)
    for _ in range(4):
        for number in list(node.stack.looking):
            node.stack.answer_fetch(number)
        node.turn()
    assert node.role.load().num_waiting == 1
    assert not node.role.has_work
    node.run()
    answers(node, "b", prompt)


def test_found_pages_without_room_are_recomputed_later():
    node = Node(num_pages=16)
    prompt = prompt_of(41)
    node.compute(prompt)
    held = node.engine.cache.allocate(8)
    node.start("b", prompt)
    node.stack.answer_all()
    node.turn()
    assert not node.stack.placing
    node.engine.cache.release(held)
    node.engine.note_pages()
    node.run()
    answers(node, "b", prompt)


def test_fetched_pages_leave_a_page_per_running_request():
    node = Node(num_pages=20)
    prompt = prompt_of(41)
    node.compute(prompt)
    running = prompt_of(37, seed=1)
    node.start("b", running, num_new=7)
    node.stack.answer_all()
    node.turn()
    node.start("c", prompt)
    node.stack.answer_all()
    for _ in range(10):
        node.turn()
    assert node.engine.num_retracted == 0
    node.run()
    answers(node, "b", running, 7)
    answers(node, "c", prompt)


def test_tier_slower_than_computing_is_only_probed(node):
    node.engine.steps.prompt_token_s = 0.001
    node.stack.cost = TierCost(latency_s=0.0, page_s=0.1, num_pages=9)
    node.start("a", prompt_of(41))
    node.start("b", prompt_of(41, seed=1))
    assert len(node.stack.looking) == 1
    node.clock.now_s += 60
    node.start("c", prompt_of(41, seed=2))
    assert len(node.stack.looking) == 2
    (load,) = node.tiering.loads()
    assert load.token_cost == pytest.approx(0.1 / PAGE / 0.001)


def test_prompt_token_time_ignores_short_final_chunks():
    node = Node(num_pages=128, chunked_prefill_size=256)
    node.start("short", prompt_of(20))
    node.run()
    assert node.engine.steps.prompt_token_s == 0
    node.start("long", prompt_of(200, seed=1))
    node.run()
    assert 0 < node.engine.steps.prompt_token_s < 1


def test_evicted_pages_were_saved_and_are_found():
    node = Node(num_pages=64, saves_at_once=False)
    prompts = [prompt_of(33, seed) for seed in range(20)]
    for i, prompt in enumerate(prompts):
        node.start(f"first {i}", prompt)
        node.run()
    for i, prompt in enumerate(prompts):
        node.start(f"again {i}", prompt)
        node.run()
        answers(node, f"again {i}", prompt)
        assert node.told.cached[f"again {i}"] == 32


def test_rejected_save_is_retried_after_a_delay(node):
    node.stack.is_full = True
    node.start("a", prompt_of(20))
    node.run()
    assert node.engine.cache.num_unsaved == 5
    assert 0 < node.tiering.wait_s(60) <= 0.11
    node.stack.is_full = False
    node.clock.now_s += 0.11
    node.run()
    assert node.engine.cache.num_unsaved == 0
    assert len(node.stack.content) == 5


def test_loop_sleeps_while_saves_are_in_progress(node):
    node.start("a", prompt_of(80))
    while node.role.has_work or node.tiering.waiting:
        node.turn()
        for number in list(node.stack.looking):
            node.stack.answer_fetch(number)
    node.turn()
    assert node.engine.cache.num_unsaved
    assert node.tiering.wait_s(60) == 60


def test_requests_waiting_for_tiers_are_counted_and_failed(node):
    node.start("a", prompt_of(41))
    assert (node.role.load().num_waiting, node.role.load().queued_tokens) == (1, 41)
    node.role.fail_all(EngineFailed("of a forward, in which it has no part"))
    assert node.told.errors == {}
    node.role.hand_over(EngineFailed("as the loop does"))
    assert node.told.errors["a"].code == "engine_failed"
    assert node.role.load().num_waiting == 0
    node.run()


PREFIXES = [prompt_of(16, 1), prompt_of(24, 2), [*prompt_of(16, 1), *prompt_of(8, 3)]]


class AnyOrder(RuleBasedStateMachine):
    """Requests arrive, are cancelled and run, while tiers answer in any order and way."""

    def __init__(self):
        super().__init__()
        self.node = self.make_node()
        self.began: dict[str, float] = {}
        self.prompts: dict[str, list[int]] = {}

    def make_node(self):
        # 20 pages: a few requests fill the pool, so that pages are evicted.
        return Node(num_pages=20, max_running_requests=4)

    @rule(prefix=st.sampled_from(PREFIXES), seed=st.integers(4, 6), salt=st.sampled_from("ab"))
    def start(self, prefix, seed, salt):
        name = str(len(self.prompts))
        self.prompts[name] = [*prefix, *prompt_of(seed, seed)]
        self.began[name] = self.node.clock.now_s
        self.node.start(name, self.prompts[name], num_new=6, salt=salt)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def cancel(self, data):
        self.node.role.cancel(self.node.ticket(data.draw(st.sampled_from(list(self.prompts)))))

    @rule(num=st.integers(1, 4))
    def turns(self, num):
        for _ in range(num):
            self.node.turn()
        for active in self.node.tiering.waiting:
            waited_s = self.node.clock.now_s - self.began[active.request.request_id]
            assert waited_s < (2 - SEARCH_SHARE) * LIMIT_S

    @rule(seconds=st.sampled_from([0.1, 0.3, 2.0]))
    def time_passes(self, seconds):
        self.node.clock.now_s += seconds
        self.node.role.poll()

    @rule(data=st.data(), at_most=st.integers(0, 9))
    def fetch(self, data, at_most):
        stack = data.draw(st.sampled_from(self.node.stacks))
        if stack.looking:
            stack.answer_fetch(data.draw(st.sampled_from(list(stack.looking))), at_most)

    @rule(data=st.data(), is_whole=st.booleans())
    def place(self, data, is_whole):
        stack = data.draw(st.sampled_from(self.node.stacks))
        if stack.placing:
            number = data.draw(st.sampled_from(list(stack.placing)))
            stack.answer_place(number, is_whole=is_whole)

    @rule(data=st.data())
    def save(self, data):
        stack = data.draw(st.sampled_from(self.node.stacks))
        if stack.saving:
            stack.answer_save(data.draw(st.sampled_from(list(stack.saving))))

    @rule(data=st.data(), is_full=st.booleans())
    def fill_up(self, data, is_full):
        data.draw(st.sampled_from(self.node.stacks)).is_full = is_full

    @rule(data=st.data())
    def answer_an_abandoned_fetch(self, data):
        stack = data.draw(st.sampled_from(self.node.stacks))
        never_begun = 1000
        number = data.draw(st.sampled_from([never_begun, *sorted(stack.cancelled)]))
        stack.reported.append(Fetched(number, 3, {"host": 3}))
        self.node.role.poll()

    @rule()
    def flush(self):
        self.node.role.flush_cache()

    @rule()
    def break_a_step(self):
        self.node.role.fail_all(EngineFailed("as the loop does"))

    @invariant()
    def every_page_has_one_owner(self):
        self.node.engine.cache.check_integrity()

    def teardown(self):
        for stack in self.node.stacks:
            stack.is_full = False
        self.node.clock.now_s += 1
        self.node.run()
        for name in self.node.told.finishes:
            assert self.node.told.tokens[name] == toy_answer(self.prompts[name], 6)
        counts = self.node.engine.counts()
        assert counts.free + counts.cached == counts.total
        assert self.node.role.tickets() == []
        for stack in self.node.stacks:
            assert not stack.looking
            assert not stack.fetched


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
