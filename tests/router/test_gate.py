"""The gate over nodes that are only numbers, and a clock that a test moves."""

import asyncio
import contextlib

import pytest

from tandem.router.admission import Limits
from tandem.router.attempt import Progress
from tandem.router.config import AdmissionConfig
from tandem.router.gate import Gate
from tandem.router.key_limits import KeyLimit
from tandem.router.metrics import RouterMetrics
from tandem.router.policy import ClusterSnapshot, NodeSnapshot
from tandem.wire.errors import DeadlinePassed, Overloaded, RateLimited
from tandem.wire.messages import NodeLoad, StartPrefill
from tests.patience import PATIENCE_S
from tests.router.fake_node import delta, request


class Rig:
    """A gate to a decode with some places; whoever was let in is on the node until it leaves."""

    def __init__(self, num_places=1, *, is_up=True, **config) -> None:
        self.now, self.num_places, self.is_up = 100.0, num_places, is_up
        self.inside, self.seen = [], []
        self.metrics = RouterMetrics()
        self.gate = Gate(
            self._snapshot, AdmissionConfig(**config), self.metrics, clock=lambda: self.now
        )
        self.leaving = {}

    def _snapshot(self):
        common = {"is_up": self.is_up, "fingerprint": "m"}
        load = NodeLoad(max_running=self.num_places)
        prefill = NodeSnapshot(
            url="p", role="prefill", load=NodeLoad(num_transferring=99), **common
        )
        decode = NodeSnapshot(
            url="d", role="decode", load=load, in_flight_requests=len(self.inside), **common
        )
        return ClusterSnapshot((prefill,), (decode,))

    async def visit(self, name, **fields):
        """Go through the gate, and stay until the test says to leave."""
        asked = request(request_id=name, **fields)
        async with self.gate.admitted(asked) as visit:
            if visit is None:
                self.seen.append(Progress(asked).aborted().finish.reason)
                return
            self.inside.append(name)
            self.seen.append(visit.request)
            self.leaving[name] = asyncio.Event()
            try:
                await self.leaving[name].wait()
            finally:
                self.inside.remove(name)

    def say_leave(self, name):
        self.now += 0.001  # longer than a count of places holds
        self.leaving[name].set()

    async def leave(self, name):
        self.say_leave(name)
        await settled()

    def counted(self, name) -> float:
        lines = self.metrics.render(ClusterSnapshot((), ()), {}).splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)]
        return sum(values)


async def settled() -> None:
    """Let every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def visitors():
    """Tasks of clients; those that still stand somewhere at the end go away."""
    async with asyncio.TaskGroup() as group:
        tasks = []

        async def send(rig, name, **fields):
            tasks.append(group.create_task(rig.visit(name, **fields), name=name))
            await settled()
            return tasks[-1]

        yield send
        for task in tasks:
            task.cancel()


async def test_who_finds_room_does_not_wait_and_the_rest_come_in_as_it_becomes_free():
    rig = Rig(num_places=2)
    async with visitors() as send:
        for name in "abcd":
            await send(rig, name)
        assert rig.inside == ["a", "b"]
        assert rig.counted("tandem_router_queued_requests ") == 2
        await rig.leave("a")
        assert rig.inside == ["b", "c"]
        await rig.leave("b")
        assert rig.inside == ["c", "d"]
        assert rig.counted("tandem_router_queue_wait_seconds_count") == 4


@pytest.mark.parametrize(("role", "other"), [("prefill", "decode"), ("decode", "prefill")])
def test_a_node_put_aside_gives_places_only_while_no_other_of_its_role_is_up(role, other):
    def node(url, role, *, is_up=True, is_aside=False):
        load = NodeLoad(max_running=2 if url == "d" else 1000)
        return NodeSnapshot(url, role, is_up, is_aside, fingerprint="m", load=load)

    def num_places(*nodes):
        partners = tuple(node(f"partner {i}", other) for i in range(20))
        prefills, decodes = (nodes, partners) if role == "prefill" else (partners, nodes)
        gate = Gate(
            lambda: ClusterSnapshot(prefills, decodes),
            AdmissionConfig(),
            RouterMetrics(),
            lambda: 0.0,
        )
        return gate._free(0.0)

    aside, well, down = (
        node("d", role, is_aside=True),
        node("d", role),
        node("d", role, is_up=False),
    )
    assert num_places(aside, well) == num_places(well) > 0
    assert num_places(aside, down) == num_places(aside) > 0


async def test_a_higher_priority_overtakes_those_that_wait():
    rig = Rig()
    async with visitors() as send:
        for name, priority in (("a", 0), ("b", 0), ("c", 7)):
            await send(rig, name, priority=priority)
        await rig.leave("a")
        assert rig.inside == ["c"]


async def test_a_place_that_only_a_report_shows_is_found():
    rig = Rig()
    async with visitors() as send:
        await send(rig, "a")
        await send(rig, "b")
        rig.num_places, rig.now = 2, rig.now + 1
        async with asyncio.timeout(PATIENCE_S):
            while rig.inside != ["a", "b"]:  # noqa: ASYNC110 - the gate looks by itself
                await asyncio.sleep(0.002)


async def test_a_client_that_goes_away_leaves_the_line_at_once():
    rig = Rig()
    async with visitors() as send:
        await send(rig, "a")
        gone = await send(rig, "b")
        await send(rig, "c")
        gone.cancel()
        await settled()
        assert rig.counted("tandem_router_queued_requests ") == 1
        assert rig.counted('tandem_router_requests_total{outcome="cancelled"}') == 1
        await rig.leave("a")
        assert rig.inside == ["c"]


async def test_a_client_that_goes_away_as_it_is_let_in_gives_its_place_back():
    rig = Rig()
    async with visitors() as send:
        await send(rig, "a")
        gone = await send(rig, "b")
        await send(rig, "c")
        rig.say_leave("a")
        for _ in range(20):
            if any(entry.is_let_in for entry in rig.gate._entries.values()):
                break
            await asyncio.sleep(0)
        else:
            pytest.fail("nobody was let in")
        rig.now += 0.001
        gone.cancel()  # let in, and not awake yet
        await settled()
        assert rig.inside == ["c"]


async def test_a_place_is_not_given_to_one_that_is_about_to_go():
    rig = Rig()
    async with visitors() as send:
        await send(rig, "a")
        gone = await send(rig, "b")
        await send(rig, "c")
        rig.say_leave("a")
        gone.cancel()  # and has not left the line when the place becomes free
        await settled()
        assert rig.inside == ["c"]


async def test_a_full_line_refuses_with_when_to_come_back():
    rig = Rig(limits=Limits(max_requests=1))
    async with visitors() as send:
        await send(rig, "a")
        await send(rig, "b")
        rig.now += 3
        with pytest.raises(Overloaded) as refused:
            await rig.visit("c")
        assert refused.value.retry_after_s == 3
        assert rig.counted('tandem_router_refused_total{reason="overloaded"}') == 1


async def test_who_is_sent_away_for_a_higher_priority_is_told():
    rig = Rig(limits=Limits(max_requests=1))
    async with visitors() as send:
        await send(rig, "a")
        low = asyncio.ensure_future(rig.visit("low"))
        await settled()
        await send(rig, "high", priority=1)
        with pytest.raises(Overloaded):
            await low
        await rig.leave("a")
        assert rig.inside == ["high"]


async def test_a_deadline_that_passed_on_the_way_is_not_started_though_there_is_room():
    with pytest.raises(DeadlinePassed):
        await Rig().visit("a", deadline_s=0.0)


async def test_a_deadline_that_passes_in_line_ends_the_wait():
    rig = Rig()
    async with visitors() as send:
        await send(rig, "a")
        with pytest.raises(DeadlinePassed):
            await rig.visit("b", deadline_s=0.01)
        assert rig.counted('tandem_router_refused_total{reason="deadline_passed"}') == 1
        assert rig.inside == ["a"]


async def test_a_wait_has_an_end_for_clients_that_name_none():
    rig = Rig(limits=Limits(max_wait_s=0.01))
    async with visitors() as send:
        await send(rig, "a")
        with pytest.raises(Overloaded):
            await rig.visit("b")


async def test_a_lone_request_that_waited_in_vain_does_not_keep_others_out():
    rig = Rig(limits=Limits(max_wait_s=0.01))
    async with visitors() as send:
        await send(rig, "a")
        waits = asyncio.ensure_future(rig.visit("b"))
        await settled()
        rig.now += 60.0
        with pytest.raises(Overloaded):
            await waits
        later = asyncio.ensure_future(rig.visit("c"))
        await settled()
        await rig.leave("a")
        assert rig.inside == ["c"]
        await rig.leave("c")
        await later


async def test_a_request_that_waits_is_ended_by_its_id():
    rig = Rig()
    async with visitors() as send:
        await send(rig, "a")
        await send(rig, "b")
        assert not rig.gate.abort("a")
        assert rig.gate.abort("b")
        assert not rig.gate.abort("b")
        await settled()
        assert rig.seen[-1] == "abort"
        await rig.leave("a")
        assert rig.inside == []


async def test_nodes_are_told_the_time_left_and_not_whose_a_request_is():
    rig = Rig()
    async with visitors() as send:
        await send(rig, "a")
        await send(rig, "b", client="12345678", deadline_s=9.0)
        rig.now += 4.0
        await rig.leave("a")
        assert rig.seen[-1].deadline_s == pytest.approx(5.0, abs=0.01)
        assert rig.seen[-1].client == ""


async def test_where_nothing_can_serve_others_say_so_and_who_waits_goes_on_waiting():
    rig = Rig()
    async with visitors() as send:
        await send(rig, "a")
        await send(rig, "b")
        rig.is_up, rig.now = False, rig.now + 1
        await send(rig, "c")
        assert rig.inside == ["a", "c"]


async def test_room_is_that_of_the_model_served_before_all_nodes_were_away():
    up = {"a"}

    def nodes():
        load = NodeLoad(max_running=1)
        served = [{"is_up": name in up, "fingerprint": name, "load": load} for name in "ba"]
        return ClusterSnapshot(
            tuple(NodeSnapshot(url="p", role="prefill", **fields) for fields in served),
            tuple(
                NodeSnapshot(
                    url="d", role="decode", in_flight_requests=f["fingerprint"] == "a", **f
                )
                for f in served
            ),
        )

    now = iter(range(100))
    limits = Limits(max_requests=0)
    gate = Gate(nodes, AdmissionConfig(limits=limits), RouterMetrics(), clock=lambda: next(now))
    for up in ({"a"}, set(), {"a", "b"}):
        refused = pytest.raises(Overloaded) if up else contextlib.nullcontext()
        with refused:
            async with gate.admitted(request()) as visit:
                assert visit is not None


async def test_without_admission_all_start_at_once():
    rig = Rig(is_on=False)
    async with visitors() as send:
        for name in "abc":
            await send(rig, name)
        assert rig.inside == ["a", "b", "c"]


async def test_what_a_key_has_running_or_in_line_is_bounded():
    rig = Rig(key_limits={"default": KeyLimit(requests_in_flight=2)})
    async with visitors() as send:
        await send(rig, "a", client="k1")
        await send(rig, "b", client="k1")
        with pytest.raises(RateLimited):
            await rig.visit("c", client="k1")
        await send(rig, "d", client="k2")
        await rig.leave("a")
        await send(rig, "e", client="k1")
        assert rig.counted('tandem_router_refused_total{reason="rate_limit_exceeded"}') == 1


class Taker:
    def take_ordinary(self, token_ids):
        return True


async def test_a_keys_tokens_are_those_of_prompt_and_answer_by_whatever_way_they_went():
    rig = Rig(num_places=9, key_limits={"default": KeyLimit(tokens_per_minute=60)})
    asked = request(prompt_ids=range(1, 31), client="k")
    start = StartPrefill(request=asked, room=1)
    async with rig.gate.admitted(asked, Taker()) as visit:
        visit.saw(delta(start, 0, [1]))
        for _ in range(58):
            assert visit.tap.take_ordinary([2])
        visit.saw(delta(start, 59, [3], "stop"))
    with pytest.raises(RateLimited) as refused:
        await rig.visit("b", client="k")
    # 90 of 60 are used, and three more are asked for, at one a second.
    assert refused.value.retry_after_s == 33
