import errno
import io
import json
import re

import pytest
import structlog

from tandem.telemetry.log import configure, console_text, get_access_logger, get_logger, read_line


@pytest.fixture(autouse=True)
def restored():
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(out: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_event_is_one_json_line_without_a_terminal():
    out = io.StringIO()
    configure("info", stream=out, role="decode")
    get_logger("a.module").info("kv_push.complete", num_pages=12)
    (line,) = lines(out)
    assert (line["event"], line["num_pages"], line["role"]) == ("kv_push.complete", 12, "decode")
    assert (line["module"], line["level"]) == ("a.module", "info")


def test_events_below_the_level_are_not_written():
    out = io.StringIO()
    configure("warning", stream=out)
    get_logger("m").info("dropped")
    get_logger("m").warning("written")
    assert [line["event"] for line in lines(out)] == ["written"]


def test_access_log_is_written_at_every_log_level():
    out = io.StringIO()
    logger = get_access_logger("m")
    configure("error", stream=out, worker=1)
    get_logger("m").warning("dropped")
    logger.info("http.request", status=200)
    (line,) = lines(out)
    assert (line["event"], line["level"], line["module"]) == ("http.request", "info", "m")
    assert (line["status"], line["worker"]) == (200, 1)


def test_logger_created_before_configure_follows_it():
    early = get_logger("m")
    out = io.StringIO()
    configure("info", stream=out)
    early.info("after")
    assert lines(out)[0]["event"] == "after"


class Writes(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.texts = []

    def write(self, text):
        self.texts.append(text)
        return super().write(text)


def test_each_line_is_a_single_write():
    out = Writes()
    configure("info", stream=out)
    for number in range(2):
        get_logger("m").info("written", number=number)
    assert [(text.count("\n"), text[-1]) for text in out.texts] == [(1, "\n")] * 2


class FullDisk(io.StringIO):
    is_full = True

    def write(self, text):
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_full_disk_only_loses_lines():
    out = FullDisk()
    configure("info", stream=out)
    get_logger("m").info("dropped")
    out.is_full = False
    get_logger("m").info("written")
    assert [line["event"] for line in lines(out)] == ["written"]


def test_unknown_level_is_rejected_listing_the_known_ones():
    with pytest.raises(ValueError, match="debug, info, warning or error"):
        configure("loud")


def test_console_format_is_not_json():
    out = io.StringIO()
    configure("info", "console", stream=out)
    get_logger("m").info("node.serving", url="http://x")
    assert "node.serving" in out.getvalue()
    assert not out.getvalue().startswith("{")


def test_json_line_is_shown_as_the_console_format_shows_it():
    shown = []
    for log_format in ("json", "console"):
        out = io.StringIO()
        configure("info", log_format, stream=out, role="prefill")
        try:
            [].pop()
        except IndexError:
            get_logger("m").exception("node.failed", url="http://x", ids=[1, 2], detail="two words")
        shown.append(out.getvalue().rstrip("\n"))
    fields = read_line(shown[0])
    assert (fields["level"], fields["event"]) == ("error", "node.failed")
    text = console_text(fields)
    assert text.partition(" ")[2] == shown[1].partition(" ")[2]
    assert re.match(r"\d\d:\d\d:\d\d ", text)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Traceback (most recent call last):",
        "{",
        "{}",
        '{"level": "info", "event": "node.up"}',
        '{"level": "info", "event": "node.up", "timestamp": 3}',
        '{"level": 1, "event": "node.up", "timestamp": "2026-01-01T00:00:00Z"}',
        '["level"]',
    ],
)
def test_other_output_is_not_read_as_a_log_line(line):
    assert read_line(line) is None
