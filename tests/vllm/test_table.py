"""The table of docs/vllm.md has every shape that the tests run."""

import re
from pathlib import Path

from tests.with_vllm.shapes import SHAPES

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"


def test_table_has_a_complete_row_for_each_shape():
    [table] = re.findall(
        r"<!-- Written by scripts/vllm-table. -->\n(.*?)<!-- End", PAGE.read_text(), re.DOTALL
    )
    _header, _line, *rows = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()
    ]
    assert [row[0] for row in rows] == [shape.name for shape in SHAPES]
    assert all(len(row) == 6 and all(row) for row in rows)
