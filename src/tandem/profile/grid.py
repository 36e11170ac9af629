"""Which forwards are measured. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

# Of what fits: a tenth of a pool stays free, for answers that grow while they are measured.
POOL_SHARE = 0.9
# Of a decode point, beside its context: it grows by a token with every step measured.
GROWTH_TOKENS = 64
SMALLEST_CHUNK = 16


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """A forward that computes `num_new` tokens of one prompt behind `num_context`."""

    num_new: int
    num_context: int


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """A forward of `batch` answers, with `num_context` tokens each before the one that it computes."""

    batch: int
    num_context: int


@dataclass(frozen=True, slots=True)
class Room:
    """What bounds the points.

    Attributes:
        num_tokens: That the pool holds.
        context_length: Of one request at most.
        page_size: Contexts are whole pages: what is computed of a page that is partly there counts as new.
        chunk: Prompt tokens of one forward at most.
        max_running: Requests of one forward at most.
        longest_context: That is measured; what is beyond is extrapolated. Attention over long contexts takes
            a CPU seconds.
    """

    num_tokens: int
    context_length: int
    page_size: int
    chunk: int
    max_running: int
    longest_context: int

    def longest(self, num_requests: int) -> int:
        """Return the tokens of each of so many requests at most."""
        return min(self.context_length, int(self.num_tokens * POOL_SHARE) // num_requests)

    def whole_pages(self, num_tokens: int) -> int:
        """Return the largest number of tokens up to this one that fills its pages."""
        return num_tokens // self.page_size * self.page_size


def prefill_points(room: Room, *, is_quick: bool = False) -> list[PrefillPoint]:
    """Return chunks of several sizes behind contexts of several lengths."""
    chunk = min(room.chunk, max(room.longest(1) // 2, 1))
    sizes = {chunk, max(chunk // 4, min(SMALLEST_CHUNK, chunk))}
    sizes |= set() if is_quick else {max(chunk // 16, min(SMALLEST_CHUNK, chunk))}
    longest = min(room.longest(1) - chunk - 1, room.longest_context)
    shares = (0, 1 / 2, 1) if is_quick else (0, 1 / 8, 1 / 3, 2 / 3, 1)
    contexts = {room.whole_pages(int(longest * share)) for share in shares}
    return [PrefillPoint(size, context) for context in sorted(contexts) for size in sorted(sizes)]


def decode_points(room: Room, *, is_quick: bool = False) -> list[DecodePoint]:
    """Return batches of several sizes, each with the contexts that the pool holds for so many."""
    return [
        DecodePoint(batch, context)
        for batch in _batches(room.max_running, 8 if is_quick else 4)
        for context in _contexts(room, batch, is_quick=is_quick)
    ]


def _batches(most: int, factor: int) -> list[int]:
    """Return 1 and its multiples by a factor, and the most there can be."""
    found = [1]
    while found[-1] * factor < most:
        found.append(found[-1] * factor)
    return sorted({*found, most})


def _contexts(room: Room, batch: int, *, is_quick: bool) -> Iterator[int]:
    longest = min(room.longest(batch) - GROWTH_TOKENS, room.longest_context)
    shares = (1 / 16, 1) if is_quick else (1 / 16, 1 / 4, 1)
    lengths = {room.whole_pages(int(longest * share)) for share in shares}
    yield from sorted(length for length in lengths if length > 0)
