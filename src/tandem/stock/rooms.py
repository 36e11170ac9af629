"""Rooms, in which prefill's half of a request leaves the reference to its KV for decode's half.

```
 prefill ── offer ──▶ room ── take, once ──▶ decode pulls the KV, computes the first token
   ▲ holds the half                            │
   └──────────────── confirm ◀─────────────────┘   refused if prefill was lost meanwhile: its blocks may have been reused
```

The halves of one adapter meet in memory, those of two adapters over HTTP: `GET /rooms/{room}` takes, `DELETE` confirms.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import aiohttp
import msgspec

from tandem.wire.errors import PeerLost, TransferRefused, TransferTimeout
from tandem.wire.generation import Room

Reference = Mapping[str, Any]
"""The parameters with which decode's engine finds the KV on prefill's."""


class _Place:
    """One room while a half uses it."""

    def __init__(self) -> None:
        self.num_users = 0
        self.offered: asyncio.Future[Reference | None] = asyncio.get_running_loop().create_future()
        self.taken, self.confirmed = asyncio.Event(), asyncio.Event()
        self.is_closed = False


class Rooms:
    """The rooms of one adapter. Nothing remains of a room once both halves have left it."""

    def __init__(self) -> None:
        self._places: dict[Room, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    @contextmanager
    def _entered(self, room: Room) -> Iterator[_Place]:
        place = self._places.setdefault(room, _Place())
        place.num_users += 1
        try:
            yield place
        finally:
            place.num_users -= 1
            if not place.num_users:
                del self._places[room]

    @contextmanager
    def offering(self, room: Room) -> Iterator["Offer"]:
        """Enter a room as prefill. If the block ends early, decode's half fails."""
        with self._entered(room) as place:
            try:
                yield Offer(place)
            finally:
                place.is_closed = True
                if not place.offered.done():
                    place.offered.set_result(None)

    async def take(self, room: Room) -> Reference:
        """Wait for the reference of a room, and take it.

        Raises:
            PeerLost: Prefill's half ended without one.
            TransferRefused: It was taken before, and the engine's blocks may have been reused since.
        """
        with self._entered(room) as place:
            reference = await asyncio.shield(place.offered)
            if reference is None:
                raise PeerLost("prefill ended without a reference to its KV")
            if place.taken.is_set() or place.is_closed:
                raise TransferRefused(
                    "the reference to prefill's KV was used before or has expired"
                )
            place.taken.set()
            return reference

    def confirm(self, room: Room) -> None:
        """Confirm that the KV has landed in decode's memory.

        Raises:
            PeerLost: Prefill was lost before, or its half ended, so what has landed may be of another request.
        """
        place = self._places.get(room)
        if place is None or place.is_closed:
            raise PeerLost("prefill was lost before its KV had landed")
        place.confirmed.set()


class Offer:
    """Prefill's side of a room."""

    def __init__(self, place: _Place) -> None:
        self._place = place

    async def offer(self, reference: Reference, limit_s: float) -> None:
        """Offer a reference until decode has confirmed it.

        Raises:
            TransferTimeout: Decode did not take it within `limit_s`; the engine frees its blocks soon.
        """
        self._place.offered.set_result(reference)
        try:
            async with asyncio.timeout(limit_s):
                await self._place.taken.wait()
        except TimeoutError as error:
            raise TransferTimeout(f"decode did not fetch the KV within {limit_s:g} s") from error
        await self._place.confirmed.wait()


class Source(Protocol):
    """Decode's side of a room; see `Rooms`."""

    async def take(self) -> Reference:
        """Wait for the reference, and take it."""

    async def confirm(self) -> None:
        """Confirm that the KV has landed."""


class OwnRoom:
    """A room of this adapter."""

    def __init__(self, rooms: Rooms, room: Room) -> None:
        self._rooms, self._room = rooms, room

    async def take(self) -> Reference:
        """Wait for the reference, and take it."""
        return await self._rooms.take(self._room)

    async def confirm(self) -> None:
        """Confirm that the KV has landed."""
        self._rooms.confirm(self._room)


class RemoteRoom:
    """A room of the adapter at a URL."""

    def __init__(self, session: aiohttp.ClientSession, url: str, room: Room) -> None:
        self._session, self._url = session, f"{url}/rooms/{room}"

    async def take(self) -> Reference:
        """Wait for the reference, and take it."""
        reference: Reference = msgspec.json.decode(await self._ask("GET"))
        return reference

    async def confirm(self) -> None:
        """Confirm that the KV has landed."""
        await self._ask("DELETE")

    async def _ask(self, method: str) -> bytes:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        try:
            async with self._session.request(method, self._url, timeout=timeout) as response:
                body = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise PeerLost(f"prefill's adapter was lost: {error!r}") from error
        if response.status != 200:
            raise TransferRefused(body.decode(errors="replace"))
        return body
