"""Traces in Mooncake's format: a JSON object a line, which says when what was asked for.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

`timestamp` is in milliseconds. A prompt is cut into blocks of 512 tokens, and equal ids stand for equal
blocks: what a prefix cache may find again.
"""

from collections.abc import Iterable

import msgspec

from tandem.wire.errors import ConfigInvalid

BLOCK_TOKENS = 512


class TraceRow(msgspec.Struct, frozen=True):
    """One request of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(lines: Iterable[bytes], name: str, limit: int = 0) -> list[TraceRow]:
    """Return the rows in the order of their time.

    Args:
        lines: Of the file; empty ones are passed over.
        name: Of the file, for errors.
        limit: Rows that are read, at most; 0: all.

    Raises:
        ConfigInvalid: A line is no such object, or there is none.
    """
    decoder = msgspec.json.Decoder(TraceRow)
    rows: list[TraceRow] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigInvalid(f"--trace {name}, line {number}: {error}") from error
        if row.input_length < 1 or row.output_length < 1 or min(row.hash_ids, default=0) < 0:
            raise ConfigInvalid(
                f"--trace {name}, line {number}: lengths are at least 1 and hash ids not negative"
            )
        rows.append(row)
        if len(rows) == limit:
            break
    if not rows:
        raise ConfigInvalid(f"--trace {name}: has no requests")
    return sorted(rows, key=lambda row: row.timestamp)


def due_times(rows: list[TraceRow], speed: float) -> list[float]:
    """Return when each row is due, in seconds after the first, `speed` times as fast as it was."""
    return [(row.timestamp - rows[0].timestamp) / 1000 / speed for row in rows]
