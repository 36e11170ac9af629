"""The queue and its bounds, and admission over nodes that are only numbers, in virtual time."""

import asyncio
import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.admission import Admission, Queue, Waiting
from tandem.router.config import AdmissionConfig, QueueLimits
from tandem.router.key_limits import KeyLimit, KeyUsage
from tandem.router.metrics import RouterMetrics
from tandem.router.nodes.state import ClusterState, RosterEntry
from tandem.wire.errors import DeadlinePassed, Overloaded, RateLimited
from tandem.wire.messages import NodeLoad
from tests.router.fake_node import request
from tests.router.virtual import in_virtual_time

# ── the queue ────────────────────────────────────────────────────────────────────────────────────

KINDS = st.tuples(st.sampled_from("abc"), st.sampled_from((-1, 0, 5)))
# A request that comes, one that leaves (by its number), or a place that becomes free.
STEPS = st.lists(st.one_of(KINDS, st.integers(0, 50), st.none()), max_size=60)


def waiting(client="a", priority=0, num_tokens=1, expires=math.inf, *, arrived=0.0, deadline=False):
    return Waiting(client, priority, num_tokens, arrived, expires, deadline)


def queue_of(clients="", **limits) -> Queue:
    return joined(Queue(QueueLimits(**limits)), *(waiting(client) for client in clients))


def joined(queue, *several) -> Queue:
    for one in several:
        assert queue.join(one, 0.0) is None
    return queue


def clients_in_order(queue) -> str:
    return "".join(taken.client for taken in iter(queue.take, None))


def test_queue_serves_clients_in_rotation():
    assert clients_in_order(queue_of("aaaabbc")) == "abcabaa"
    queue = queue_of("aaaa")
    assert queue.take().client == "a"
    assert clients_in_order(joined(queue, waiting("late"), waiting("a"))) == "alateaaa"
    queue, gone = queue_of("bb"), [waiting("a") for _ in range(50)]
    joined(queue, *gone, waiting("a"))
    for one in gone:
        assert queue.leave(one)
    assert clients_in_order(queue) == "bab"


@given(STEPS)
def test_queue_takes_the_highest_priority_and_keeps_the_order_of_each_client(steps):
    queue, inside = queue_of(), []
    for step in steps:
        if isinstance(step, tuple):
            inside.append(waiting(*step, num_tokens=len(inside) + 1))
            queue.join(inside[-1], 0.0)
        elif step is None:
            taken = queue.take()
            assert (taken is None) == (not inside)
            if taken is not None:
                assert taken.priority == max(each.priority for each in inside)
                kind = taken.client, taken.priority
                assert taken is next(e for e in inside if (e.client, e.priority) == kind)
                inside.remove(taken)
        elif step < len(inside):
            gone = inside.pop(step)
            assert queue.leave(gone)
            assert not queue.leave(gone)
        assert len(queue) == len(inside)
        assert queue.num_tokens == sum(each.num_tokens for each in inside)


@given(st.lists(KINDS, min_size=1, max_size=30), KINDS)
def test_full_queue_evicts_only_the_lowest_priority(there, newcomer):
    queue = queue_of(max_requests=len(there))
    for kind in there:
        queue.join(waiting(*kind), 0.0)
    one_more = waiting(*newcomer)
    with contextlib.suppress(Overloaded):
        rejected = queue.join(one_more, 0.0)
        assert rejected.priority == min(priority for _, priority in there) <= one_more.priority
        # It would not get its place back from the newcomer.
        with contextlib.suppress(Overloaded):
            assert queue.join(rejected, 0.0) is not one_more


def test_client_that_fills_the_queue_does_not_block_others():
    queue = queue_of("g" * 10, max_requests=10)
    for _ in range(5):
        assert queue.join(waiting("modest"), 0.0).client == "g"
    with pytest.raises(Overloaded):  # now they have as much as each other
        queue.join(waiting("modest"), 0.0)


def test_queue_is_bounded_in_tokens_except_for_a_single_request():
    queue = queue_of(max_tokens=100)
    queue.join(waiting(num_tokens=1000), 0.0)
    with pytest.raises(Overloaded):
        queue.join(waiting(num_tokens=1), 0.0)
    queue.take()
    queue.join(waiting(num_tokens=60), 0.0)
    queue.join(waiting(num_tokens=40), 0.0)
    with pytest.raises(Overloaded):  # and a place that the last would leave is not enough
        queue.join(waiting(num_tokens=50, priority=1), 0.0)


def test_full_queue_sets_retry_after_to_the_wait_of_its_next_request():
    queue = queue_of(max_requests=2)
    assert queue.retry_after_s(0.0) == 1
    for _ in range(2):
        queue.join(waiting(), 0.0)
    for now, after_s in ((0.3, 1), (6.5, 7)):
        with pytest.raises(Overloaded) as refused:
            queue.join(waiting(), now)
        assert refused.value.retry_after_s == after_s


def test_queue_expiry_is_the_earlier_of_deadline_and_queue_limit():
    queue = queue_of(max_wait_s=5.0)
    with pytest.raises(DeadlinePassed):
        queue.join(waiting(expires=1.0, deadline=True), 1.0)
    assert queue.expiry(10.0, None) == queue.expiry(10.0, 99.0) == 15.0
    assert queue.expiry(10.0, 11.0) == 11.0
    assert isinstance(queue.too_late(waiting(), 0.0), Overloaded)


# ── admission ────────────────────────────────────────────────────────────────────────────────────


class Rig:
    """Admission to a decode with some places; an admitted request is on the node until it leaves."""

    def __init__(self, num_places=1, *, is_up=True, keys=None, pages=None, **config) -> None:
        self.num_places, self.is_up, self.pages = num_places, is_up, pages or {}
        self.inside, self.lengths, self.seen, self.ends = [], {}, [], {}
        self.metrics = RouterMetrics()
        self.admission = Admission(
            self._state, AdmissionConfig(**config), self.metrics.of("m"), keys
        )

    def _state(self):
        common = {"is_up": self.is_up, "fingerprint": "m"}
        prefill = RosterEntry("p", "prefill", load=NodeLoad(num_transferring=99), **common)
        num, num_tokens = len(self.inside), sum(self.lengths[name] for name in self.inside)
        decode = RosterEntry(
            "d",
            "decode",
            load=NodeLoad(max_running=self.num_places, **self.pages),
            in_flight_requests=num,
            in_flight_tokens=num_tokens,
            fresh_tokens=num_tokens,
            **common,
        )
        return ClusterState((prefill,), (decode,))

    async def serve(self, name, **fields):
        """Be admitted, and stay until the test has the request leave."""
        admitted = await self.admission.admit(request(request_id=name, **fields))
        if admitted is None:
            self.seen.append("abort")
            return
        self.lengths[name] = len(admitted.request.prompt_ids)
        self.inside.append(name)
        self.seen.append(admitted.request)
        self.ends[name] = asyncio.Event()
        try:
            await self.ends[name].wait()
        finally:
            self.inside.remove(name)
            admitted.end(0)

    async def leave(self, name):
        self.ends[name].set()
        await settled()

    def counted(self, name) -> float:
        lines = self.metrics.render(ClusterState((), ()), {}).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def settled() -> None:
    """Let every task run that can, and the time pass for which a count of places is used."""
    await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def requests():
    """Yield a function that sends requests; those that are left at the end are cancelled."""
    async with asyncio.TaskGroup() as group:
        tasks = []

        async def send(rig, name, **fields):
            tasks.append(group.create_task(rig.serve(name, **fields), name=name))
            await settled()
            return tasks[-1]

        yield send
        for task in tasks:
            task.cancel()


@in_virtual_time
async def test_request_queues_until_a_place_becomes_free():
    rig = Rig(num_places=2)
    async with requests() as send:
        for name in "abcd":
            await send(rig, name)
        assert rig.inside == ["a", "b"]
        assert rig.counted("tandem_router_queued_requests{") == 2
        await rig.leave("a")
        assert rig.inside == ["b", "c"]
        await rig.leave("b")
        assert rig.inside == ["c", "d"]
        assert rig.counted("tandem_router_queued_requests{") == 0
        assert rig.counted("tandem_router_queue_wait_seconds_count") == 4
    assert not any(rig.admission.leftovers.values())


PAGES = {"page_size": 16, "num_pages": 1000, "pages_free": 20}


@in_virtual_time
async def test_requests_start_while_pages_are_free_for_their_prompts():
    rig = Rig(num_places=64, pages=PAGES)
    async with requests() as send:
        for name in "abcdef":
            await send(rig, name, prompt_ids=range(64))
        assert rig.inside == ["a", "b", "c", "d"]
        await rig.leave("a")
        assert rig.inside == ["b", "c", "d", "e"]
    assert not any(rig.admission.leftovers.values())


@in_virtual_time
async def test_requests_that_start_together_share_the_free_pages():
    rig = Rig(num_places=64, pages=PAGES)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(rig.serve(name, prompt_ids=range(64))) for name in "abcdef"]
        await settled()
        assert rig.inside == ["a", "b", "c", "d"]
        for task in tasks:
            task.cancel()


@pytest.mark.parametrize(("role", "other"), [("prefill", "decode"), ("decode", "prefill")])
@in_virtual_time
async def test_node_put_aside_has_places_only_while_it_is_the_last_of_its_role(role, other):
    def node(url, role, *, is_up=True, is_aside=False):
        load = NodeLoad(max_running=2 if url == "d" else 1000)
        return RosterEntry(url, role, is_up, is_aside, fingerprint="m", load=load)

    def num_places(*nodes):
        partners = tuple(node(f"partner {i}", other) for i in range(20))
        prefills, decodes = (nodes, partners) if role == "prefill" else (partners, nodes)
        state = ClusterState(prefills, decodes)
        return (
            Admission(lambda: state, AdmissionConfig(), RouterMetrics().of("m"))
            .places(0.0)
            .num_requests
        )

    aside, well = node("d", role, is_aside=True), node("d", role)
    assert num_places(aside, well) == num_places(well) > 0
    assert num_places(aside, node("d", role, is_up=False)) == num_places(aside) > 0


@in_virtual_time
async def test_request_between_two_attempts_keeps_exactly_one_place():
    rig = Rig()
    async with requests() as send:
        await send(rig, "a")
        await send(rig, "b")
        rig.inside.remove("a")  # its node died, and it waits for another
        rig.admission.schedule_start()
        await settled()
        assert rig.inside == []
        rig.inside.append("a")
        rig.num_places = 2
        rig.admission.schedule_start()
        await settled()
        assert rig.inside == ["a", "b"]


@in_virtual_time
async def test_reported_room_starts_a_waiting_request_within_a_millisecond():
    rig = Rig()
    async with requests() as send:
        await send(rig, "a")
        await send(rig, "b")
        rig.num_places = 2
        await asyncio.sleep(5.0)
        assert rig.inside == ["a"]
        rig.admission.schedule_start()  # as at every change of a node
        await settled()
        assert rig.inside == ["a", "b"]


@in_virtual_time
async def test_client_disconnect_removes_its_queued_request():
    rig = Rig()
    async with requests() as send:
        await send(rig, "a")
        gone = await send(rig, "b")
        await send(rig, "c")
        gone.cancel()
        await settled()
        assert rig.counted("tandem_router_queued_requests{") == 1
        assert rig.counted('tandem_router_requests_total{model_name="m",outcome="cancelled"}') == 1
        await rig.leave("a")
        assert rig.inside == ["c"]


@pytest.mark.parametrize("num_turns", range(6))
@in_virtual_time
async def test_place_is_not_lost_if_its_client_disconnects_as_it_becomes_free(num_turns):
    rig = Rig()
    async with requests() as send:
        await send(rig, "a")
        gone = await send(rig, "b")
        await send(rig, "c")
        rig.ends["a"].set()
        for _ in range(num_turns):  # before it is started, and after, when it is not awake yet
            await asyncio.sleep(0)
        gone.cancel()
        await settled()
        assert rig.inside == ["c"]


@in_virtual_time
async def test_full_queue_rejects_with_retry_after_and_yields_to_higher_priority():
    rig = Rig(limits=QueueLimits(max_requests=1))
    async with requests() as send:
        await send(rig, "a")
        low = asyncio.ensure_future(rig.serve("low"))
        await asyncio.sleep(2.5)
        with pytest.raises(Overloaded) as refused:
            await rig.serve("equal")
        assert refused.value.retry_after_s == 3
        await send(rig, "high", priority=1)
        with pytest.raises(Overloaded):
            await low
        assert rig.counted('tandem_router_refused_total{model_name="m",reason="overloaded"}') == 2
        await rig.leave("a")
        assert rig.inside == ["high"]


@in_virtual_time
async def test_request_is_refused_unread_only_if_it_would_be_refused_anyway():
    rig = Rig(limits=QueueLimits(max_requests=2))
    async with requests() as send:
        for name in "abc":
            rig.admission.check("", 0)
            await send(rig, name)
        with pytest.raises(Overloaded):
            rig.admission.check("", 0)
        rig.admission.check("", 1)
        rig.admission.check("other", 0)  # the queue is full of another client's requests
        await rig.leave("a")
        rig.admission.check("", 0)


@in_virtual_time
async def test_request_with_an_expired_deadline_is_rejected_on_arrival():
    with pytest.raises(DeadlinePassed):
        await Rig().serve("a", deadline_s=0.0)


@pytest.mark.parametrize(
    ("limits", "fields", "error"),
    [
        ({}, {"deadline_s": 2.0}, DeadlinePassed),
        ({"max_wait_s": 2.0}, {}, Overloaded),
        ({"max_wait_s": 2.0}, {"deadline_s": 9.0}, Overloaded),
    ],
)
@in_virtual_time
async def test_queue_wait_ends_at_the_deadline_or_the_queue_limit(limits, fields, error):
    rig = Rig(limits=QueueLimits(**limits))
    async with requests() as send:
        await send(rig, "a")
        began = asyncio.get_running_loop().time()
        with pytest.raises(error):
            await rig.serve("b", **fields)
        assert asyncio.get_running_loop().time() == pytest.approx(began + 2.0)
        assert (
            rig.counted(f'tandem_router_refused_total{{model_name="m",reason="{error.code}"}}') == 1
        )
        # However long it waited in vain, the next one is queued and starts.
        later = await send(rig, "c")
        await rig.leave("a")
        assert rig.inside == ["c"]
        later.cancel()


@in_virtual_time
async def test_queued_request_is_aborted_by_its_id():
    rig = Rig()
    async with requests() as send:
        await send(rig, "a")
        await send(rig, "b")
        assert not rig.admission.abort("a")
        assert rig.admission.abort("b")
        assert not rig.admission.abort("b")
        await settled()
        assert rig.seen[-1] == "abort"
        await rig.leave("a")
        assert rig.inside == []


@in_virtual_time
async def test_nodes_get_the_remaining_deadline_without_the_client():
    rig = Rig()
    async with requests() as send:
        await send(rig, "a")
        await send(rig, "b", client="12345678", deadline_s=9.0)
        await asyncio.sleep(4.0)
        await rig.leave("a")
        assert rig.seen[-1].deadline_s == pytest.approx(5.0, abs=0.01)
        assert rig.seen[-1].client == ""


@in_virtual_time
async def test_requests_bypass_admission_without_nodes_but_overtake_no_queued_one():
    rig = Rig()
    async with requests() as send:
        await send(rig, "a")
        rig.is_up = False
        await send(rig, "b")
        assert rig.inside == ["a", "b"]
        rig.is_up = True
        await send(rig, "c")
        rig.is_up = False
        await asyncio.sleep(1.0)
        await send(rig, "d")
        assert rig.inside == ["a", "b"]
        rig.is_up = True
        await rig.leave("a")
        await rig.leave("b")
        assert rig.inside == ["c"]


@in_virtual_time
async def test_room_counts_nodes_of_the_last_served_model():
    up = {"a"}

    def nodes():
        load = NodeLoad(max_running=1)
        served = [{"is_up": name in up, "fingerprint": name, "load": load} for name in "ba"]
        return ClusterState(
            tuple(RosterEntry("p", "prefill", **fields) for fields in served),
            tuple(
                RosterEntry("d", "decode", in_flight_requests=f["fingerprint"] == "a", **f)
                for f in served
            ),
        )

    limits = QueueLimits(max_requests=0)
    admission = Admission(nodes, AdmissionConfig(limits=limits), RouterMetrics().of("m"))
    for up in ({"a"}, set(), {"a", "b"}):
        await settled()
        refused = pytest.raises(Overloaded) if up else contextlib.nullcontext()
        with refused:
            admitted = await admission.admit(request())
            admitted.end(0)


@in_virtual_time
async def test_disabled_admission_starts_all_requests_immediately():
    rig = Rig(is_on=False)
    async with requests() as send:
        for name in "abc":
            await send(rig, name)
        assert rig.inside == ["a", "b", "c"]


@in_virtual_time
async def test_key_token_budget_counts_prompt_and_output():
    rig = Rig(num_places=9, keys=KeyUsage({"default": KeyLimit(tokens_per_minute=60)}))
    admitted = await rig.admission.admit(request(prompt_ids=range(1, 31), client="k"))
    admitted.end(60)
    with pytest.raises(RateLimited) as refused:
        await rig.serve("b", client="k")
    # 90 of 60 are used, and three more are asked for, at one a second.
    assert refused.value.retry_after_s == 33
