"""Messages as bytes: msgpack by msgspec, of one direction only, up to a limit."""

from typing import Any, Generic, TypeVar

import msgspec

from tandem.wire.errors import MessageInvalid, MessageTooLarge
from tandem.wire.messages import Message

# A prompt of 1M ids is 5 MB of msgpack; nothing we send is larger.
MAX_MESSAGE_BYTES = 16 << 20

In = TypeVar("In", bound=Message)


class Codec(Generic[In]):
    """Encodes any message and decodes those of one direction.

    Args:
        incoming: A union of message structs; anything else is refused.
    """

    def __init__(self, incoming: Any, limit_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._limit_bytes = limit_bytes

    def encode(self, message: Message) -> bytes:
        """Return the frame of `message`.

        Raises:
            MessageTooLarge: The frame passes the limit.
        """
        frame = self._encoder.encode(message)
        if len(frame) > self._limit_bytes:
            raise MessageTooLarge(len(frame), self._limit_bytes)
        return frame

    def decode(self, frame: bytes) -> In:
        """Return the message in `frame`.

        Raises:
            MessageTooLarge: The frame passes the limit.
            MessageInvalid: The bytes are no message of this direction.
        """
        if len(frame) > self._limit_bytes:
            raise MessageTooLarge(len(frame), self._limit_bytes)
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MessageInvalid(f"not a message of this channel: {error}") from error
