"""One part of a room at decode: what was granted to whom, and whether what arrived is what was sent."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from tandem.kvtransfer.checksum import arrived_sums, sampled_slabs
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.parts import RoomParts
from tandem.kvtransfer.plan import HeadRange, PagedTokens
from tandem.kvtransfer.prefill_links import PrefillLink
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.session import ReceiverState, Session, receiver_session
from tandem.wire import hand_off
from tandem.wire.ids import Room


@dataclass(slots=True)
class GrantRoom:
    """Everything known of one part.

    Attributes:
        link: To the rank of prefill that pushes it.
        have_tokens: Prompt tokens before those of the granted pages.
        deadline_s: When prefill is given up.
        has_last_word: Prefill said Landed or Released; the link's worker takes the pages back, and
            looks at them.
        landed: What prefill said at the end.
    """

    link: PrefillLink
    page_ids: Sequence[int]
    have_tokens: int
    deadline_s: float = float("inf")
    session: Session[ReceiverState] = field(default_factory=receiver_session)
    has_last_word: bool = False
    landed: hand_off.Landed | None = None

    def verify(self, landed: hand_off.Landed, layout: KVLayout, region: MemoryRegion) -> str:
        """Return what is wrong with the bytes that arrived, or an empty string."""
        granted = PagedTokens(layout, self.page_ids, self.have_tokens)
        end_token = landed.end_token or granted.end_token
        if not 0 <= granted.end_token - end_token < layout.page_size:
            return f"tokens up to {end_token} were written and {granted.end_token} granted"
        one_in = landed.checksum_one_in
        slabs = sampled_slabs(landed.room, layout, one_in)
        heads = HeadRange(0, self.link.heads.start, len(self.link.heads))
        sums = arrived_sums(region, granted, end_token, slabs, heads)
        if sums == landed.checksums:
            return ""
        num_bad = sum(a != b for a, b in zip_longest(sums, landed.checksums))
        return f"{num_bad} of {len(sums)} pages have other bytes than were sent"


class GrantParts(RoomParts):
    """The parts of one room.

    Attributes:
        first: Part 0. Its Landed says the most of the prompt: prefill's rank 0 wrote it, if that has
            heads of ours.
        granted_s: When the first part was granted; None before.
    """

    granted_s: float | None = None

    def __init__(self, room: Room, first: GrantRoom) -> None:
        super().__init__(room)
        self.first = first
