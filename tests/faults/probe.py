"""The load of an engine, asked every few milliseconds over the token plane: fresher than /server_info,
which tells what the engine last said by itself."""

import asyncio
import contextlib

import aiohttp
import msgspec

from tandem.router.config import host_of
from tandem.wire.async_link import AsyncLink
from tandem.wire.channel import tcp_address
from tandem.wire.errors import PeerLost
from tandem.wire.keys import ChannelKey
from tandem.wire.messages import FromEngine, NodeInfo, NodeLoad, Ping, Pong

QUICK_S, SLOW_S = 0.004, 0.1
RETRY_S = 0.1
SILENT_S = 3.0


class Probe:
    """Asks one node's engine, over all of its lives, for as long as `run` runs.

    Attributes:
        load: What it last said; None while it says nothing.
        interval_s: Between two questions.
    """

    def __init__(self, url: str, key: ChannelKey | None) -> None:
        self.url, self._key = url, key
        self.load: NodeLoad | None = None
        self.interval_s = SLOW_S
        self.told = asyncio.Event()
        self._patience: asyncio.Timeout | None = None

    @property
    def unaccounted(self) -> int | None:
        """Pages that are neither free nor cached; None while it says nothing."""
        load = self.load
        return None if load is None else load.num_pages - load.pages_free - load.pages_cached

    async def run(self, session: aiohttp.ClientSession) -> None:
        while True:
            try:
                async with session.get(
                    f"{self.url}/server_info", timeout=aiohttp.ClientTimeout(total=2)
                ) as response:
                    info = msgspec.json.decode(await response.read(), type=NodeInfo)
            except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError):
                await asyncio.sleep(RETRY_S)
                continue
            await self._ask(tcp_address(host_of(self.url), info.engine_port))

    async def _ask(self, address: str) -> None:
        link = AsyncLink[FromEngine](address, FromEngine, self._hear, self._key)
        try:
            async with asyncio.TaskGroup() as tasks:
                pinging = tasks.create_task(self._ping(link))
                with contextlib.suppress(TimeoutError):
                    # An engine that had gone before is never lost: it is one that does not answer.
                    async with asyncio.timeout(SILENT_S) as self._patience:
                        await link.wait_lost()
                pinging.cancel()
        finally:
            self.load = self._patience = None
            link.close()

    def _hear(self, messages: list[FromEngine]) -> None:
        for message in messages:
            if isinstance(message, Pong):
                self.load = message.load
                if self._patience is not None:
                    with contextlib.suppress(RuntimeError):  # it is expiring at this moment
                        self._patience.reschedule(asyncio.get_running_loop().time() + SILENT_S)
                self.told.set()

    async def _ping(self, link: AsyncLink[FromEngine]) -> None:
        while True:
            with contextlib.suppress(PeerLost):
                link.send(Ping())
            await asyncio.sleep(self.interval_s)
