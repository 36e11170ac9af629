"""One request's tokens over all of its attempts, and both halves of each: pure, no I/O.

The rule that covers it all: tokens carry their index; the first copy of index i is taken and any
other is dropped. So prefill's first token and decode's copy of it, a replay's overlap and a late
message of a dead attempt need no special case.
"""

import msgspec
from typing_extensions import override

from wire.errors import PeerLost
from wire.ids import RequestId
from wire.messages import Finish, GenerateRequest, TokenDelta


class Progress:
    """What a request's client has been given so far, and what is still to come.

    Attributes:
        sent_ids: Tokens given to the client, over all attempts.
        is_finished: The last delta was given.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.sent_ids: list[int] = []
        self.is_finished = False
        self._request = request

    @override
    def __repr__(self) -> str:
        state = "finished" if self.is_finished else "running"
        return f"<Progress {self._request.request_id} {state} next_index={self.next_index}>"

    @property
    def request_id(self) -> RequestId:
        """The request's id: the same in every attempt."""
        return self._request.request_id

    @property
    def next_index(self) -> int:
        """Index of the token that the client waits for."""
        return self._request.num_prior_tokens + len(self.sent_ids)

    def accept(self, delta: TokenDelta) -> TokenDelta | None:
        """Return the part of a delta that is new to the client, or None when nothing is.

        Raises:
            PeerLost: Tokens before this delta never came: the stream is torn and can be replayed.
        """
        end = delta.index + len(delta.token_ids)
        if self.is_finished or end < self.next_index:
            return None
        if delta.index > self.next_index:
            raise PeerLost(f"tokens {self.next_index} to {delta.index - 1} never arrived")
        token_ids = delta.token_ids[self.next_index - delta.index :]
        finish = _end_of_request(delta)
        if not token_ids and finish is None:
            return None
        # Of later attempts, most of the "cached" prompt is what this request itself computed.
        cached_tokens = 0 if self.sent_ids else delta.cached_tokens
        new = msgspec.structs.replace(
            delta,
            index=self.next_index,
            token_ids=token_ids,
            finish=finish,
            cached_tokens=cached_tokens,
        )
        self.sent_ids += token_ids
        self.is_finished = finish is not None
        return new

    def remaining(self) -> GenerateRequest:
        """Return what an attempt has to do from here: the sent tokens become part of the prompt."""
        return msgspec.structs.replace(
            self._request,
            prompt_ids=self._request.prompt_ids + self.sent_ids,
            num_prior_tokens=self.next_index,
        )


def _end_of_request(delta: TokenDelta) -> Finish | None:
    """Return why the request ended; a hand-off ends prefill's part only."""
    is_hand_off = delta.finish is not None and delta.finish.reason == "handed_off"
    return None if is_hand_off else delta.finish
