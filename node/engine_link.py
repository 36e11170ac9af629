"""The link between a node's HTTP process and its own engine, over all that becomes of it."""

from collections.abc import Callable

from tandem.frontend.engine_client import EngineClient
from tandem.telemetry.log import get_logger

log = get_logger(__name__)


async def keep_linked(
    client: EngineClient, make: Callable[[], EngineClient], use: Callable[[EngineClient], None]
) -> None:
    """Run a node's link to its engine, and a new one whenever it is lost, until cancelled.

    A node that was frozen as a whole (a paused container, a suspended machine) finds each of its links
    silent for too long when it wakes, this one too; its engine lives on. An engine that ended is
    somebody else's to notice.

    Args:
        make: Returns another link to the same life of the engine.
        use: Told of each new link before it runs.
    """
    while True:
        await client.run()
        log.warning("engine.link_lost", address=client.address, action="connecting anew")
        client = make()
        use(client)
