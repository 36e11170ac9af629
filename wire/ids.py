"""Identifiers that cross process borders, each with a type of its own."""

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
"""One generation, from HTTP to the last token. Unique within one edge worker's life."""

Room = NewType("Room", int)
"""Where the two halves of one attempt find each other. Random, 0 ... 2^63-1."""

Epoch = NewType("Epoch", int)
"""One life of one process. Random; a message from another epoch is refused."""


def new_request_id() -> RequestId:
    """Return a fresh request id: 24 hexadecimal digits."""
    return RequestId(secrets.token_hex(12))


def new_room() -> Room:
    """Return a fresh room, uniform over 63 bits so that collisions need no handling."""
    return Room(secrets.randbits(63))


def new_epoch() -> Epoch:
    """Return a fresh epoch. 63 bits: every language's signed integer holds it."""
    return Epoch(secrets.randbits(63))
