"""Structured logs: events with fields, coloured on a terminal, one JSON object per line elsewhere.

Two events are prose, as in other engines: `Prefill batch, ...` and `Decode batch, ...`.

`tandem up` reads the JSON lines of its processes. For that, `level`, `event` and `timestamp` of every line, and the
events in the constants below, keep their names and types.
"""

import contextlib
import io
import json
import logging
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, TextIO, cast

import structlog
from typing_extensions import override

LogFormat = Literal["auto", "console", "json"]

# Events of a node's start. `model.downloading` has an integer `percent`.
MODEL_DOWNLOADING = "model.downloading"
MODEL_RESOLVED = "model.resolved"

_CONSOLE_TIME = "%H:%M:%S"


class _Lossy(io.TextIOBase):
    """A stream that drops a line if the write fails (disk full, closed pipe) instead of raising."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    @override
    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return self._out.write(text)
        return len(text)

    @override
    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._out.flush()


def configure(
    level: str = "info",
    log_format: LogFormat = "auto",
    stream: TextIO | None = None,
    **bound: object,
) -> None:
    """Set up logging for this process. Call once, in `__main__`.

    Args:
        level: Lowest level to write: debug, info, warning or error.
        log_format: `auto` colours on a terminal and writes JSON lines elsewhere.
        stream: Output stream; default stderr, because stdout is for results.
        **bound: Fields added to every line of this process, such as `role`.

    Raises:
        ValueError: The level is unknown.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"unknown log level {level!r}: use debug, info, warning or error")
    out = stream or sys.stderr
    console = log_format == "console" or (log_format == "auto" and out.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=out.isatty())
        if console
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(
                fmt="iso" if not console else _CONSOLE_TIME, utc=not console
            ),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        # One write per line: the processes of a router share a stream, and partial lines would interleave.
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _Lossy(out))),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**bound)


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """Return a logger whose lines carry `module=name`."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(module=name)
    return logger


def get_access_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """Return a logger that writes at every log level, for lines that an operator turned on by a flag."""
    every_level = structlog.make_filtering_bound_logger(logging.NOTSET)
    logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        None, wrapper_class=every_level, module=name
    )
    return logger


def read_line(line: str) -> Mapping[str, Any] | None:
    """Return the fields of a JSON log line; None for other output, such as a traceback."""
    if not line.startswith("{"):
        return None
    try:
        fields = json.loads(line)
        datetime.fromisoformat(fields["timestamp"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    is_event = isinstance(fields.get("level"), str) and isinstance(fields.get("event"), str)
    return fields if is_event else None


def console_text(fields: Mapping[str, Any]) -> str:
    """Return the fields of a JSON log line in console format, without colours."""
    time = datetime.fromisoformat(fields["timestamp"]).astimezone().strftime(_CONSOLE_TIME)
    render = structlog.dev.ConsoleRenderer(colors=False)
    return str(render(None, "", {**fields, "timestamp": time}))
