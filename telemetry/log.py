"""Structured logs: events with fields, coloured on a terminal, one JSON object a line elsewhere.

Holds configuration of structlog and nothing else. Two lines are prose by tradition and are logged
as their own event text: `Prefill batch, ...` and `Decode batch, ...`.
"""

import contextlib
import io
import logging
import sys
from typing import Literal, TextIO, cast

import structlog
from typing_extensions import override

LogFormat = Literal["auto", "console", "json"]


class _Lossy(io.TextIOBase):
    """A log's end: lines for which there is no room, or no reader, are lost, and nothing else is."""

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
        level: Name of the lowest level that is written: debug, info, warning or error.
        log_format: `auto` colours on a terminal and writes JSON lines elsewhere.
        stream: Where lines go; standard error by default, so that stdout stays for results.
        **bound: Fields that every line of this process carries, such as `role`.

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
                fmt="iso" if not console else "%H:%M:%S", utc=not console
            ),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        # One write a line: the processes of a router share an end, where parts of lines would mix.
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _Lossy(out))),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**bound)


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """Return a logger whose lines carry `module=name`."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(module=name)
    return logger
