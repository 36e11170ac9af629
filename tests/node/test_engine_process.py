import asyncio

from tandem.frontend.engine_client import EngineClient
from tandem.node.engine_process import keep_linked
from tests.router.fake_node import FakeEngine, until


async def test_a_link_that_was_lost_is_made_anew_to_the_same_life_of_the_engine():
    engine, used = FakeEngine(), []
    make = lambda: EngineClient(engine.address, epoch=engine.epoch)  # noqa: E731
    linked = asyncio.create_task(keep_linked(make, used.append))
    try:
        await until(lambda: used and used[0].is_up)
        used[0].stop()  # as silence does
        await until(lambda: len(used) == 2 and used[1].is_up)
        assert not used[0].is_up
    finally:
        linked.cancel()
        await asyncio.wait([linked])
        engine.close()
    assert not used[-1].is_up
