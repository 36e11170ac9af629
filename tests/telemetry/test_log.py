import errno
import io
import json

import pytest
import structlog

from tandem.telemetry.log import configure, get_logger


@pytest.fixture(autouse=True)
def restored():
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(out: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_an_event_is_one_json_line_with_its_fields_where_no_terminal_reads():
    out = io.StringIO()
    configure("info", stream=out, role="decode")
    get_logger("a.module").info("kv_push.complete", num_pages=12)
    (line,) = lines(out)
    assert (line["event"], line["num_pages"], line["role"]) == ("kv_push.complete", 12, "decode")
    assert (line["module"], line["level"]) == ("a.module", "info")


def test_what_is_below_the_level_is_not_written():
    out = io.StringIO()
    configure("warning", stream=out)
    get_logger("m").info("unheard")
    get_logger("m").warning("heard")
    assert [line["event"] for line in lines(out)] == ["heard"]


def test_a_logger_made_before_the_configuration_follows_it():
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


def test_a_line_is_one_write_for_other_processes_write_to_the_same_end():
    out = Writes()
    configure("info", stream=out)
    for number in range(2):
        get_logger("m").info("heard", number=number)
    assert [(text.count("\n"), text[-1]) for text in out.texts] == [(1, "\n")] * 2


class FullDisk(io.StringIO):
    is_full = True

    def write(self, text):
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_a_full_disk_costs_lines_and_nothing_else():
    out = FullDisk()
    configure("info", stream=out)
    get_logger("m").info("unheard")
    out.is_full = False
    get_logger("m").info("heard")
    assert [line["event"] for line in lines(out)] == ["heard"]


def test_an_unknown_level_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="debug, info, warning or error"):
        configure("loud")


def test_the_console_form_is_for_people():
    out = io.StringIO()
    configure("info", "console", stream=out)
    get_logger("m").info("node.serving", url="http://x")
    assert "node.serving" in out.getvalue()
    assert not out.getvalue().startswith("{")
