from pathlib import Path

import pytest

from tandem.kvtransfer.session import RECEIVER, SENDER, diagram

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hand-off.md"


@pytest.mark.parametrize("table", [SENDER, RECEIVER], ids=["sender", "receiver"])
def test_the_page_shows_the_table_as_it_is(table):
    assert f"```\n{diagram(table)}\n```" in PAGE.read_text()
