import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.trace import TraceRow, due_times, read_trace
from tandem.wire.errors import ConfigInvalid

# The first lines of a trace that Mooncake published, with fewer ids.
PUBLISHED = b"""\
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47, 2366]}
"""

ROWS = st.lists(
    st.builds(
        TraceRow,
        timestamp=st.floats(0, 1e9),
        input_length=st.integers(1, 10**6),
        output_length=st.integers(1, 10**6),
        hash_ids=st.lists(st.integers(0, 2**40), max_size=5),
    ),
    min_size=1,
    max_size=20,
)


def test_published_lines_are_read():
    rows = read_trace(PUBLISHED.splitlines(), "t")
    assert rows[0] == TraceRow(27482, 6955, 52, [46, 47, 48])
    assert due_times(rows, 1.0) == [0.0, pytest.approx(3.053)]
    assert due_times(rows, 2.0) == [0.0, pytest.approx(1.5265)]


@given(ROWS)
def test_what_was_written_is_read_in_the_order_of_its_time(rows):
    lines = [msgspec.json.encode(row) for row in rows]
    assert read_trace(lines, "t") == sorted(rows, key=lambda row: row.timestamp)
    due = due_times(read_trace(lines, "t"), 3.0)
    assert due[0] == 0.0
    assert due == sorted(due)


def test_a_limit_takes_the_first_lines_and_reads_no_further():
    assert len(read_trace([*PUBLISHED.splitlines(), b"no json"], "t", limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{", "line 2"),
        (b'{"timestamp": 1, "input_length": 5}', "output_length"),
        (b'{"timestamp": 1, "input_length": 0, "output_length": 1}', "at least 1"),
        (b'{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-1]}', "hash ids"),
        (b"\xff", "line 2"),
    ],
)
def test_a_line_that_is_no_request_is_refused_with_its_number(line, told):
    with pytest.raises(ConfigInvalid, match=told):
        read_trace([b"", line], "t")


def test_an_empty_trace_is_refused():
    with pytest.raises(ConfigInvalid, match="no requests"):
        read_trace([b"\n"], "t")
