"""docs/protocol.md lists every message of the hand-off link with its fields and defaults."""

import re
from pathlib import Path

import msgspec
import pytest

from tandem.wire import hand_off
from tandem.wire.hand_off import FromPrefill, ToPrefill

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()
NAMED = re.compile(r"`(\w+)`(?: = ([^\s`,|]+))?")
DEFAULTS = {"nil": None, "false": False, "[]": [], '""': ""}


def rows(title):
    """Return each message's fields and defaults from the table under a heading."""
    section = PAGE.split(f"### {title}\n", 1)[1].split("\n#", 1)[0]
    found, message = {}, ""
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        if not line.startswith("|") or len(cells) < 3 or "`" not in line:
            continue
        message = cells[0].strip("|` ") or message
        for name, default in NAMED.findall(cells[1]):
            value = DEFAULTS.get(default, default) if default else msgspec.NODEFAULT
            found.setdefault(message, {})[name] = (
                value if value is msgspec.NODEFAULT else str(value)
            )
    return found


@pytest.mark.parametrize(
    ("title", "union"),
    [("Decode to prefill", ToPrefill), ("Prefill to decode", FromPrefill)],
)
def test_page_lists_every_field_and_default_of_each_message(title, union):
    def default_of(field):
        if field.default_factory is not msgspec.NODEFAULT:
            return str(field.default_factory())
        return field.default if field.default is msgspec.NODEFAULT else str(field.default)

    kinds = union.__args__
    assert rows(title) == {
        kind.__name__: {field.name: default_of(field) for field in msgspec.structs.fields(kind)}
        for kind in kinds
    }


def test_page_describes_the_current_protocol_version():
    assert f"**Version {hand_off.PROTOCOL}.**" in PAGE
