"""The interface between a stock node and the API of its engine."""

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from tandem.stock.rooms import Meeting, Offer
from tandem.vllm.node.outputs import EngineCounts, HandOffParams, StepOutput
from tandem.wire.generation import GenerateRequest, Room

# Parameters that all engines have under our names.
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine reports of itself.

    Attributes:
        life: Differs between two processes at one address.
        aliases: As in `ModelInfo`.
        kind: Engine, version, model and connector: a pair needs the same.
        model: Name or directory with which the engine was started.
        num_ranks: Number of data-parallel ranks, among which the engine itself divides requests.
        takes_prompts: Whether a decode engine can compute prompts itself.
    """

    life: str
    name: str
    kind: str
    version: str
    model: str
    context_length: int
    max_prompt_tokens: int
    num_ranks: int = 1
    takes_prompts: bool = True
    aliases: list[str] = []


class Dialect(Protocol):
    """Asks one engine: token ids in, token ids out. The outputs have no request id yet.

    Every method raises `PeerLost` if the engine does not answer, and other errors of `HttpEngine`.
    """

    engine: str
    url: str

    async def learn(self) -> EngineFacts:
        """Return the engine's facts.

        Raises:
            NoNodeAvailable: It cannot be used; the message says what to do.
        """

    async def poll(self) -> EngineCounts:
        """Return the load. Raises `PeerLost` also if another process answers since `learn`."""

    def body(self, request: GenerateRequest, hand_off: HandOffParams | None) -> dict[str, object]:
        """Return a request in the engine's words; raise `InvalidRequest` if it has none for it."""

    def whole(self, body: dict[str, object]) -> AsyncIterator[StepOutput]:
        """Generate without another node."""

    def prefill(self, body: dict[str, object], offer: Offer) -> AsyncIterator[StepOutput]:
        """Compute a prompt, and wait until decode has its KV. Yields no token."""

    def decode(
        self, body: dict[str, object], rooms: Meeting, room: Room
    ) -> AsyncIterator[StepOutput]:
        """Fetch the KV of a prompt, and generate."""


def shared_sampling(request: GenerateRequest, longest: str, shortest: str) -> dict[str, object]:
    """Return the sampling parameters that engines have in common.

    Args:
        longest, shortest: The engine's names for the numbers of new tokens. It counts tokens of earlier attempts as prompt
            tokens.
    """
    sampling, num_prior = request.sampling, request.num_prior_tokens
    num_new = max(1, sampling.max_new_tokens - num_prior)
    params: dict[str, object] = {name: getattr(sampling, name) for name in _SAME}
    params[longest] = num_new
    params[shortest] = max(0, min(sampling.min_new_tokens - num_prior, num_new))
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    return params
