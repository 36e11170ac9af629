import asyncio

from tandem.router.waiters import Waiters
from tandem.wire.ids import RequestId
from tests.patience import PATIENCE_S


async def test_who_waits_longest_looks_again_first():
    waiters, looked = Waiters(), []

    async def wait(name: str, deadline: float) -> None:
        with waiters.entered(RequestId(name)) as waiter:
            assert await waiter.before(deadline)
            looked.append(name)

    names = [f"r{number}" for number in range(50)]
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(wait(name, deadline))
        await asyncio.sleep(0)
        assert len(waiters) == len(names)
        waiters.tell()
    assert looked == names
    assert len(waiters) == 0
