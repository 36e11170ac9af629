"""What the two hosts of a pair say to each other, beside the messages of probes that pass through."""

from typing import Annotated

import msgspec

from tandem.doctor.probe import Check, Checked, NotOpened, Opened
from tandem.doctor.report import LinkLimits, TransportRow
from tandem.wire.errors import ErrorInfo
from tandem.wire.messages import Message

Name = Annotated[str, msgspec.Meta(max_length=200)]


class Begin(Message, frozen=True, kw_only=True):
    """Let us measure, with pools of this shape.

    Attributes:
        address: Of the connecting host, as it is reached from the listening one.
    """

    version: Name
    host: Name
    address: Name
    page_bytes: int
    num_pages: int


class Welcome(Message, frozen=True, kw_only=True):
    """Agreed."""

    version: Name
    host: Name


class Refused(Message, frozen=True, kw_only=True):
    """Not with you, or not so."""

    error: ErrorInfo


class Open(Message, frozen=True, kw_only=True):
    """Start to receive by this transport."""

    transport: Name


class Failed(Message, frozen=True, kw_only=True):
    """The probe of the listening end broke."""

    error: ErrorInfo


class Shut(Message, frozen=True, kw_only=True):
    """End what `Open` started."""


class Finished(Message, frozen=True, kw_only=True):
    """What came of it, for the listening end to show."""

    limits: LinkLimits
    transports: Annotated[list[TransportRow], msgspec.Meta(max_length=100)]


class Farewell(Message, frozen=True, kw_only=True):
    """Heard."""


class Alive(Message, frozen=True, kw_only=True):
    """Still there."""


ToListening = Begin | Open | Check | Shut | Finished | Alive
ToConnecting = Welcome | Refused | Opened | NotOpened | Failed | Checked | Farewell | Alive
