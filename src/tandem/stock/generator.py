"""Runs requests on a stock engine, as the `Generator` of the role that nodes with vLLM use."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from tandem.stock.dialect import Dialect
from tandem.stock.rooms import Meeting, Rooms
from tandem.stock.sent import SentPrefixes
from tandem.telemetry.log import get_logger
from tandem.vllm.hand_offs import WorkerReports
from tandem.vllm.node.outputs import EngineCounts, HandOffParams, NoAdapters, StepOutput
from tandem.wire.errors import EngineFailed, PeerLost, TandemError
from tandem.wire.generation import Finish, GenerateRequest, Room
from tandem.wire.messages import ModelInfo

log = get_logger(__name__)

Checked = tuple[GenerateRequest, dict[str, object], HandOffParams | None]


class StockGenerator:
    """Runs requests on one life of an engine. Implements `Generator`.

    Args:
        meeting: Returns the rooms of a hand-off, for decode.
        sent: Records the prompts sent to the engine.

    Attributes:
        on_news: Called when `step` or `take_transfers` has something to return.
        suspect: Set when a request finds the engine lost.
        load: The last polled load.
    """

    def __init__(
        self,
        dialect: Dialect,
        model: ModelInfo,
        rooms: Rooms,
        meeting: Callable[[HandOffParams], Meeting],
        sent: SentPrefixes,
    ) -> None:
        self._dialect, self._rooms, self._meeting, self._sent = dialect, rooms, meeting, sent
        self.model, self.adapters = model, NoAdapters()
        self.load, self.suspect = EngineCounts(), asyncio.Event()
        self.on_news: Callable[[], None] = lambda: None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._outputs: list[StepOutput] = []
        self._reports = WorkerReports()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to return."""
        return bool(self._outputs)

    def meet(self) -> None:
        """Do nothing: the engine's ranks agree among themselves."""

    def check(self, request: GenerateRequest, hand_off: HandOffParams | None) -> Checked:
        """Convert a request for `add`, or raise `InvalidRequest`."""
        return request, self._dialect.body(request, hand_off), hand_off

    def add(self, request_id: str, checked: object) -> None:
        """Send a checked request to the engine."""
        assert isinstance(checked, tuple)
        request, body, hand_off = checked
        self._sent.note(request)
        self._tasks[request_id] = asyncio.create_task(self._run(request_id, body, hand_off))

    def abort(self, request_id: str) -> None:
        """Abort a request; an unknown id is ignored."""
        if task := self._tasks.pop(request_id, None):
            task.cancel()  # closes the connection, at which the engine aborts

    def land(self, _request_id: str, _first_id: int) -> Finish | None:
        """Return None: this generator reports no landed tokens, because decode's engine draws the first itself."""
        return None

    def step(self) -> list[StepOutput]:
        """Return the outputs since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_transfers(self) -> WorkerReports:
        """Return the ends of hand-offs and requests since the last call."""
        reports, self._reports = self._reports, WorkerReports()
        return reports

    def counts(self) -> EngineCounts:
        """Return the last polled load."""
        return self.load

    def flush_cache(self) -> None:
        """Do nothing: stock engines have no such route outside of their development modes."""

    async def _run(
        self, request_id: str, body: dict[str, object], hand_off: HandOffParams | None
    ) -> None:
        try:
            if hand_off is None:
                await self._pass(request_id, self._dialect.whole(body))
            elif hand_off.is_decode:
                rooms, room = self._meeting(hand_off), Room(hand_off.room)
                await self._pass(request_id, self._dialect.decode(body, rooms, room))
            else:
                with self._rooms.offering(Room(hand_off.room)) as offer:
                    outputs = self._dialect.prefill(body, offer)
                    await self._pass(request_id, outputs, has_finish=False)
                self._reports.handed_off[request_id] = 1
        except TandemError as error:
            self._reports.failed[request_id] = error.info()
            if isinstance(error, PeerLost):
                self.suspect.set()
        except Exception as error:
            log.exception("request.failed")
            failure = EngineFailed(f"the engine's answer cannot be read: {error!r}")
            self._reports.failed[request_id] = failure.info()
        finally:
            self._tasks.pop(request_id, None)
            self.on_news()

    async def _pass(
        self, request_id: str, outputs: AsyncIterator[StepOutput], *, has_finish: bool = True
    ) -> None:
        is_whole = False
        async for output in outputs:
            is_whole = output.finish is not None or not has_finish
            self._outputs.append(replace(output, request_id=request_id))
            self.on_news()
        if not is_whole:
            raise PeerLost("the engine ended the request without the end of the answer")
        # The role forgets a request with its end, so the loop takes the outputs first.
        await asyncio.sleep(0)
