"""What a request has said so far."""

from collections.abc import Iterable

from tandem.wire.generation import GenerateRequest


class Seen:
    """The distinct tokens of one request, kept as they come.

    Attributes:
        ids: Distinct tokens of prompt and answer.
        counts: How often each of `ids` stands in the answer.
    """

    def __init__(self, prompt_ids: Iterable[int], output_ids: Iterable[int]) -> None:
        self.ids: list[int] = []
        self.counts: list[int] = []
        self._places: dict[int, int] = {}
        for token in prompt_ids:
            self._place(token)
        for token in output_ids:
            self.add(token)

    def add(self, token: int) -> None:
        """Count a token of the answer."""
        self.counts[self._place(token)] += 1

    def _place(self, token: int) -> int:
        place = self._places.get(token)
        if place is None:
            self._places[token] = place = len(self.ids)
            self.ids.append(token)
            self.counts.append(0)
        return place


def seen_by(request: GenerateRequest) -> Seen | None:
    """Return what a request has seen before its first step here; None when no penalty asks."""
    p = request.sampling
    if p.repetition_penalty == 1.0 and not p.frequency_penalty and not p.presence_penalty:
        return None
    start = len(request.prompt_ids) - request.num_prior_tokens
    return Seen(request.prompt_ids[:start], request.prompt_ids[start:])
