"""The flags of admission: how many requests start, and who waits."""

import argparse

from tandem.router.config import AdmissionConfig, Limits
from tandem.router.key_limits import read_limits
from tandem.wire.errors import ConfigInvalid

_DEFAULTS = Limits()


def add_admission_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags to a parser's group."""
    add = group.add_argument
    add(
        "--max-in-flight",
        type=int,
        default=0,
        metavar="N",
        help="requests at one node at once; the rest waits here (default: as many as the node works on)",
    )
    add(
        "--max-queued-requests",
        type=int,
        default=_DEFAULTS.max_requests,
        metavar="N",
        help="requests that wait in one edge worker; more are refused with 429 (default: %(default)s)",
    )
    add(
        "--max-queued-tokens",
        type=int,
        default=_DEFAULTS.max_tokens,
        metavar="N",
        help="tokens of their prompts in all: 36 bytes of memory each (default: %(default)s)",
    )
    add(
        "--max-queue-wait-s",
        type=float,
        default=_DEFAULTS.max_wait_s,
        metavar="SECONDS",
        help="a request that waited this long is rejected with 429 (default: %(default)g)",
    )
    add(
        "--key-limits",
        default="",
        metavar="FILE",
        help="TOML: what each API key may use; see `tandem docs admission`",
    )
    add(
        "--no-admission",
        dest="has_admission",
        action="store_false",
        help="start every request at once: all lines are the nodes'",
    )


def read_admission(args: argparse.Namespace) -> AdmissionConfig:
    """Return what the flags say; reads the file of limits.

    Raises:
        ConfigInvalid: A value or the file cannot work; the sentence says what to give.
    """
    for flag, value in (
        ("--max-in-flight", args.max_in_flight),
        ("--max-queued-requests", args.max_queued_requests),
        ("--max-queued-tokens", args.max_queued_tokens),
        ("--max-queue-wait-s", args.max_queue_wait_s),
    ):
        if not 0 <= value < 2**63:  # neither NaN nor infinity
            raise ConfigInvalid(f"{flag} is {value}: give at least 0")
    return AdmissionConfig(
        is_on=args.has_admission,
        max_in_flight=args.max_in_flight,
        limits=Limits(
            max_requests=args.max_queued_requests,
            max_tokens=args.max_queued_tokens,
            max_wait_s=args.max_queue_wait_s,
        ),
        key_limits=read_limits(args.key_limits) if args.key_limits else {},
    )
