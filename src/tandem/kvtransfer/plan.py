"""Turns *tokens in these pages → the same tokens in those pages* into contiguous copies. Pure.

The two pools may differ in page size and in number of heads. This file handles those differences,
so that transports need not. Equal pages become one copy each. Copies that are adjacent on both
sides are merged.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tandem.kvtransfer.layout import KVLayout, Planes

Int64s = NDArray[np.int64]

MANY_COPIES = 10_000


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Copies, in order, as arrays of equal length. Offsets are bytes from the start of each pool."""

    source_offset: Int64s
    destination_offset: Int64s
    size_bytes: Int64s

    def columns(self) -> tuple[Int64s, Int64s, Int64s]:
        """Return the three arrays."""
        return self.source_offset, self.destination_offset, self.size_bytes

    @property
    def total_bytes(self) -> int:
        """Total size of all copies."""
        return int(self.size_bytes.sum())

    def __len__(self) -> int:
        return len(self.size_bytes)

    def copies(self) -> Iterator[tuple[int, int, int]]:
        """Yield (source offset, destination offset, size) as plain integers."""
        return zip(
            self.source_offset.tolist(),
            self.destination_offset.tolist(),
            self.size_bytes.tolist(),
            strict=True,
        )

    def batches(self, max_bytes: int, max_copies: int) -> Iterator["CopyPlan"]:
        """Yield the same copies in plans of at most `max_copies` copies and 2 x `max_bytes` bytes.

        No single copy in them is larger than `max_bytes`.
        """
        if len(self) <= max_copies and 0 < self.total_bytes <= max_bytes:
            yield self
            return
        small = self._chopped(max_bytes)
        filled = np.cumsum(small.size_bytes) - small.size_bytes  # bytes before each copy
        group = filled // max_bytes
        begins = np.flatnonzero(np.diff(group, prepend=-1)).tolist()
        for begin, end in itertools.pairwise([*begins, len(small)]):
            for first in range(begin, end, max_copies):
                yield small[first : min(first + max_copies, end)]

    def shifted(self, source_bytes: int, destination_bytes: int) -> "CopyPlan":
        """Return the same copies with these bytes added to the offsets."""
        source, destination = self.source_offset + source_bytes, self.destination_offset
        return CopyPlan(source, destination + destination_bytes, self.size_bytes)

    def _chopped(self, max_bytes: int) -> "CopyPlan":
        pieces = -(-self.size_bytes // max_bytes)
        if not len(self) or pieces.max() == 1:
            return self
        which = np.repeat(np.arange(len(self)), pieces)
        begin = (np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * max_bytes
        return CopyPlan(
            self.source_offset[which] + begin,
            self.destination_offset[which] + begin,
            np.minimum(max_bytes, self.size_bytes[which] - begin),
        )

    def __getitem__(self, part: slice) -> "CopyPlan":
        return CopyPlan(
            self.source_offset[part], self.destination_offset[part], self.size_bytes[part]
        )


class PagedTokens(NamedTuple):
    """Pages that hold the tokens of one prompt from `first_token` on, in order."""

    layout: KVLayout
    page_ids: Sequence[int]
    first_token: int = 0

    @property
    def end_token(self) -> int:
        """One past the last token that fits in these pages."""
        return self.first_token + len(self.page_ids) * self.layout.page_size


class HeadRange(NamedTuple):
    """`num_heads` heads, starting at `source_first` in the source and `destination_first` in the destination."""

    source_first: int
    destination_first: int
    num_heads: int


class _TokenRuns(NamedTuple):
    """Runs of tokens that cross no page boundary on either side, as arrays of equal length."""

    source_page: Int64s
    source_slot: Int64s
    destination_page: Int64s
    destination_slot: Int64s
    num_tokens: Int64s


class CopyRoute:
    """The path of tokens and heads from source to destination pages, split at page boundaries once for all layers.

    Args:
        source: Pages to read.
        destination: Pages to write; their heads have the shape of the source's.
        tokens: Positions in the prompt, step 1, that both sides' pages cover.
        heads: Heads to copy; None means all, which requires that both sides hold the same number.

    Raises:
        ValueError: A side does not cover the tokens or heads, or has no such page.
    """

    def __init__(
        self,
        source: PagedTokens,
        destination: PagedTokens,
        tokens: range,
        heads: HeadRange | None = None,
    ) -> None:
        self._heads = heads = heads or HeadRange(0, 0, source.layout.num_kv_heads)
        self._source, self._destination = source.layout, destination.layout
        pages = (
            _checked(source, tokens, heads.source_first, heads.num_heads),
            _checked(destination, tokens, heads.destination_first, heads.num_heads),
        )
        runs = _runs(source, destination, pages, tokens)
        has_all_heads = heads.num_heads == source.layout.num_kv_heads
        is_whole = (runs.num_tokens == source.layout.page_size) & (
            has_all_heads and source.layout.has_same_pages(destination.layout)
        )
        self._whole = _TokenRuns(*(column[is_whole] for column in runs))
        self._parts = _TokenRuns(*(column[~is_whole] for column in runs))
        self._before: tuple[range, CopyPlan] | None = None

    def copies(self, layers: range | None = None) -> CopyPlan:
        """Return the copies of some layers, step 1; None means all.

        Only these tokens of these layers are written; the rest of a page is unchanged.

        Raises:
            ValueError: There are no such layers.
        """
        return self._copies(range(self._source.num_layers) if layers is None else layers)

    def plans(self, layers: range, max_copies: int = MANY_COPIES) -> Iterator[CopyPlan]:
        """Yield the same copies in plans of at most `max_copies`, or of one layer if it has more.

        If there are many copies, those of the first layers are planned, and shifted for the other layers. Reusing a
        few small arrays costs a tenth of making large ones.

        Raises:
            ValueError: There are no such layers.
        """
        copies_of_layer = 2 * self._heads.num_heads * len(self._parts.num_tokens)
        at_a_time = max(1, max_copies // max(1, copies_of_layer))
        for first in range(layers.start, layers.stop, at_a_time):
            plan = self._shifted(range(first, min(first + at_a_time, layers.stop)))
            if len(plan):
                yield plan

    def _shifted(self, layers: range) -> CopyPlan:
        """Return the copies of some layers; if all layers are alike, by shifting the previous copies."""
        here, there = self._source.planes.layer_step, self._destination.planes.layer_step
        if self._before is not None and here is not None and there is not None:
            before, plan = self._before
            if len(layers) == len(before):
                further = layers.start - before.start
                return plan.shifted(further * here, further * there)
        self._before = layers, self._copies(layers)
        return self._before[1]

    def _copies(self, layers: range) -> CopyPlan:
        if layers and (layers.start < 0 or layers.stop > self._source.num_layers):
            raise ValueError(f"{layers} of {self._source.num_layers} layers")
        whole = _whole_pages(self._source, self._destination, self._whole, layers)
        if not len(self._parts.num_tokens):
            return _merged(whole)
        parts = _slices(self._source, self._destination, self._parts, self._heads, layers)
        if not len(whole):
            return parts
        columns = zip(_merged(whole).columns(), parts.columns(), strict=True)
        return CopyPlan(*(np.concatenate(pair) for pair in columns))


def plan_copies(
    source: PagedTokens,
    destination: PagedTokens,
    tokens: range,
    heads: HeadRange | None = None,
    layers: range | None = None,
) -> CopyPlan:
    """Return the copies that move `tokens` of `heads` and `layers`; see `CopyRoute`."""
    return CopyRoute(source, destination, tokens, heads).copies(layers)


def _checked(side: PagedTokens, tokens: range, first_head: int, num_heads: int) -> Int64s:
    """Return the pages of a side that covers the tokens and heads."""
    if tokens and (tokens.start < side.first_token or tokens.stop > side.end_token):
        raise ValueError(
            f"the pages hold tokens {side.first_token} to {side.end_token}, not all of {tokens}"
        )
    if first_head < 0 or first_head + num_heads > side.layout.num_kv_heads:
        raise ValueError(f"heads {first_head} + {num_heads} of {side.layout.num_kv_heads}")
    pages = np.array(side.page_ids, np.int64)
    if len(pages) and (pages.min() < 0 or pages.max() >= side.layout.num_pages):
        raise ValueError(f"a page id is outside the pool of {side.layout.num_pages}")
    return pages


def _runs(
    source: PagedTokens, destination: PagedTokens, pages: tuple[Int64s, Int64s], tokens: range
) -> _TokenRuns:
    borders = [np.array([tokens.start], np.int64)]
    for side in (source, destination):
        size = side.layout.page_size
        past = tokens.start - side.first_token
        borders.append(np.arange(tokens.start + size - past % size, tokens.stop, size))
    begin = np.unique(np.concatenate(borders)) if tokens else np.empty(0, np.int64)
    num_tokens = np.diff(begin, append=tokens.stop)
    where = [
        divmod(begin - side.first_token, side.layout.page_size) for side in (source, destination)
    ]
    return _TokenRuns(
        pages[0][where[0][0]], where[0][1], pages[1][where[1][0]], where[1][1], num_tokens
    )


def _whole_pages(
    source: KVLayout, destination: KVLayout, runs: _TokenRuns, layers: range
) -> CopyPlan:
    """Make one copy for each page and each run of planes that are adjacent on both sides."""
    begin = source.planes.begin
    is_filled = begin[1:] > begin[:-1]
    chosen = np.arange(2 * layers.start, 2 * layers.stop)
    chosen = chosen[is_filled[chosen]]
    starts_run = np.ones(len(chosen), np.bool_)
    sides = (source.planes, destination.planes)
    starts_run[1:] = np.any([_is_apart(planes, chosen) for planes in sides], axis=0)
    first = chosen[starts_run]
    last = chosen[np.append(starts_run[1:], True)[: len(chosen)]]
    sizes = begin[last + 1] - begin[first]

    def offsets(planes: Planes, pages: Int64s) -> Int64s:
        return (planes.base[first][:, None] + planes.stride[first][:, None] * pages).ravel()

    return CopyPlan(
        offsets(sides[0], runs.source_page),
        offsets(sides[1], runs.destination_page),
        np.repeat(sizes, len(runs.num_tokens)),
    )


def _is_apart(planes: Planes, chosen: Int64s) -> NDArray[np.bool_]:
    """Return for each chosen plane except the first whether it is not adjacent to the previous one in memory."""
    before, after = chosen[:-1], chosen[1:]
    ends = planes.base[before] + planes.begin[before + 1] - planes.begin[before]
    is_apart: NDArray[np.bool_] = (ends != planes.base[after]) | (
        planes.stride[before] != planes.stride[after]
    )
    return is_apart


def _slices(
    source: KVLayout, destination: KVLayout, runs: _TokenRuns, heads: HeadRange, layers: range
) -> CopyPlan:
    """Make one copy per run, layer, K or V, and head, or one for all heads if every run is a whole page."""
    is_joined = source.page_size == destination.page_size and bool(
        (runs.num_tokens == source.page_size).all()
    )
    num_heads = heads.num_heads
    from_, sizes = _rows(source, layers, heads.source_first, num_heads, is_joined=is_joined)
    to, _ = _rows(destination, layers, heads.destination_first, num_heads, is_joined=is_joined)
    token_bytes = source.planes.token_bytes[from_.plane]

    def offsets(layout: KVLayout, page: Int64s, slot: Int64s, rows: _Rows) -> Int64s:
        strides = layout.planes.stride[rows.plane]
        begins: Int64s
        # The first form avoids temporary arrays, which would double the time.
        if _all_equal(strides) and _all_equal(token_bytes):
            begins = np.add.outer(page * strides[0] + slot * token_bytes[0], rows.begin)
        else:
            begins = np.outer(page, strides) + np.outer(slot, token_bytes) + rows.begin
        return begins.ravel()

    plan = CopyPlan(
        offsets(source, runs.source_page, runs.source_slot, from_),
        offsets(destination, runs.destination_page, runs.destination_slot, to),
        np.outer(runs.num_tokens, sizes).ravel(),
    )
    # Merging very many copies costs more than it saves if few are adjacent. The rows of all runs have the same
    # positions, so the first runs are a sample.
    sample = plan[: 4 * len(from_.plane)]
    if len(plan) > MANY_COPIES and 2 * len(_merged(sample)) > len(sample):
        return plan
    return _merged(plan)


def _all_equal(values: Int64s) -> bool:
    """Return whether all values are equal; False if there are none."""
    return len(values) > 0 and bool((values == values[0]).all())


class _Rows(NamedTuple):
    """Heads, or planes whose heads are copied together, as arrays of equal length."""

    plane: Int64s
    begin: Int64s


def _rows(
    layout: KVLayout, layers: range, first_head: int, num_heads: int, *, is_joined: bool
) -> tuple[_Rows, Int64s]:
    """Return where the heads of some layers begin in page 0, and their bytes per token.

    Args:
        num_heads: Number of the layout's heads, from `first_head` on. A plane may divide each of them further.
        is_joined: Whether the heads of a plane form one row.
    """
    planes = layout.planes
    chosen = np.arange(layers.start * 2, layers.stop * 2)
    share = planes.num_heads[chosen] // layout.num_kv_heads
    heads = share * num_heads
    num_rows = np.minimum(1, heads) if is_joined else heads
    plane = np.repeat(chosen, num_rows)
    head = np.arange(len(plane)) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    head += np.repeat(share * first_head, num_rows)
    token_bytes = planes.token_bytes[plane]
    begin = planes.base[plane] + head * layout.page_size * token_bytes
    heads_per_row = np.repeat(heads, num_rows) if is_joined else np.ones(len(plane), np.int64)
    return _Rows(plane, begin), token_bytes * heads_per_row


def _merged(plan: CopyPlan) -> CopyPlan:
    """Merge each copy into the previous one where they are adjacent on both sides."""
    if not len(plan):
        return plan
    size = plan.size_bytes[:-1]
    is_apart = (plan.source_offset[:-1] + size != plan.source_offset[1:]) | (
        plan.destination_offset[:-1] + size != plan.destination_offset[1:]
    )
    begin = np.concatenate(([0], np.flatnonzero(is_apart) + 1))
    return CopyPlan(
        plan.source_offset[begin],
        plan.destination_offset[begin],
        np.add.reduceat(plan.size_bytes, begin),
    )
