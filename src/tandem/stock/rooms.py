"""Rooms, in which prefill's half of a request leaves the reference to its KV for decode's half.

```
 prefill ─── put ───▶ room ── take, once ──▶ decode pulls the KV, computes the first token
   ▲ holds the half                            │
   └──────────────── confirm ◀─────────────────┘   refused if prefill was lost meanwhile: its blocks may have been reused
```

The halves of one adapter meet in memory, those of two adapters over HTTP: `GET /rooms/{room}` takes, `DELETE` confirms.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Protocol

import aiohttp
import msgspec

from tandem.stock.http_engine import CONNECT_S
from tandem.wire.errors import PeerLost, TransferRefused, TransferTimeout
from tandem.wire.generation import Room

Reference = Mapping[str, Any]
"""The parameters with which decode's engine finds the KV on prefill's."""


class Meeting(Protocol):
    """Decode's side of rooms; see `Rooms`."""

    async def take(self, room: Room) -> Reference:
        """Wait for the reference of a room, and take it."""

    async def confirm(self, room: Room) -> None:
        """Confirm that the KV has landed."""


class Offer:
    """One room while a half uses it, and prefill's side of it."""

    def __init__(self) -> None:
        self.num_users = 0
        self.reference: asyncio.Future[Reference | None] = (
            asyncio.get_running_loop().create_future()
        )
        self.taken, self.confirmed = asyncio.Event(), asyncio.Event()
        self.is_closed = False

    def put(self, reference: Reference) -> None:
        """Leave the reference for decode."""
        self.reference.set_result(reference)

    async def landed(self, limit_s: float) -> None:
        """Wait until decode has confirmed it.

        Raises:
            TransferTimeout: Decode did not take it within `limit_s`; the engine frees its blocks soon.
        """
        try:
            async with asyncio.timeout(limit_s):
                await self.taken.wait()
        except TimeoutError as error:
            raise TransferTimeout(f"decode did not fetch the KV within {limit_s:g} s") from error
        # No limit: decode's engine may queue the request. If decode's half ends first, the router cancels this one.
        await self.confirmed.wait()


class Rooms:
    """The rooms of one adapter. Implements `Meeting`. Nothing remains of a room once both halves have left it."""

    def __init__(self) -> None:
        self._offers: dict[Room, Offer] = {}

    @contextmanager
    def _entered(self, room: Room) -> Iterator[Offer]:
        offer = self._offers.setdefault(room, Offer())
        offer.num_users += 1
        try:
            yield offer
        finally:
            offer.num_users -= 1
            if not offer.num_users:
                del self._offers[room]

    @contextmanager
    def offering(self, room: Room) -> Iterator[Offer]:
        """Enter a room as prefill. If the block ends early, decode's half fails."""
        with self._entered(room) as offer:
            try:
                yield offer
            finally:
                offer.is_closed = True
                if not offer.reference.done():
                    offer.reference.set_result(None)

    async def take(self, room: Room) -> Reference:
        """Wait for the reference of a room, and take it.

        Raises:
            PeerLost: Prefill's half ended without one.
            TransferRefused: It was taken before, and the engine's blocks may have been reused since.
        """
        with self._entered(room) as offer:
            reference = await asyncio.shield(offer.reference)
            if reference is None:
                raise PeerLost("prefill ended without a reference to its KV")
            if offer.taken.is_set() or offer.is_closed:
                raise TransferRefused(
                    "the reference to prefill's KV was used before or has expired"
                )
            offer.taken.set()
            return reference

    async def confirm(self, room: Room) -> None:
        """Confirm that the KV has landed in decode's memory.

        Raises:
            PeerLost: Prefill was lost before, or its half ended, so what has landed may be of another request.
        """
        offer = self._offers.get(room)
        if offer is None or offer.is_closed:
            raise PeerLost("prefill was lost before its KV had landed")
        offer.confirmed.set()


class RemoteRooms:
    """The rooms of the adapter at a URL. Implements `Meeting`."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def take(self, room: Room) -> Reference:
        """Wait for the reference of a room, and take it."""
        reference: Reference = msgspec.json.decode(await self._ask("GET", room))
        return reference

    async def confirm(self, room: Room) -> None:
        """Confirm that the KV has landed."""
        await self._ask("DELETE", room)

    async def _ask(self, method: str, room: Room) -> bytes:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        try:
            async with self._session.request(
                method, f"{self._url}/rooms/{room}", timeout=timeout
            ) as response:
                body = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise PeerLost(f"prefill's adapter was lost: {error!r}") from error
        if response.status != HTTPStatus.OK:
            raise TransferRefused(body.decode(errors="replace"))
        return body
