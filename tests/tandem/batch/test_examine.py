"""Input files, good and bad."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from tandem.batch.examine import InputFile
from tandem.wire.errors import ConfigInvalid

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def line(**changed) -> str:
    return json.dumps({k: v for k, v in (GOOD | changed).items() if v is not None})


def file_of(tmp_path, *lines, max_line_bytes=1000) -> InputFile:
    (tmp_path / "in").write_text("\n".join(lines) + "\n")
    return InputFile(tmp_path / "in", max_line_bytes)


def test_requests_are_numbered_without_blank_and_invalid_lines(tmp_path):
    file = file_of(tmp_path, line(), "", "{", line(custom_id="b"), line(custom_id="c"))
    assert file.examine().num_requests == 3
    wanted = [(r.custom_id, r.number) for r in file.requests(lambda number: number != 1)]
    assert wanted == [("a", 0), ("c", 2)]
    assert next(file.requests(lambda number: True)).body == b'{"prompt": "x"}', "as it was written"
    file.close()


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "malformed|truncated"),
        ("[1]", "object"),
        (line(custom_id=None), "custom_id"),
        (line(custom_id=""), "custom_id is empty"),
        (line(custom_id=7), "str"),
        (line(method="GET"), "give POST"),
        (line(url="/v1/audio"), "give /v1/chat/completions, /v1/completions or /v1/embeddings"),
        (line(body=None), "body"),
        (line(body="x"), "object"),
        (line(body={"stream": True}), "stream is true"),
        (line(body={"prompt": "x" * 2000}), "longer than 1000 bytes"),
        ('{"custom_id": "\xff', "malformed|truncated"),
    ],
)
def test_a_bad_line_is_told_with_its_number_and_what_it_lacks(tmp_path, bad, said):
    file = file_of(tmp_path, line(), bad, line(custom_id="b"))
    found = file.examine()
    assert (found.num_requests, found.num_invalid) == (2, 1)
    assert found.invalid[0].startswith("line 2: ")
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(found.told)
    file.close()


def test_a_name_that_is_there_twice_is_refused_with_both_lines(tmp_path):
    lines = [line(custom_id=str(number)) for number in range(1000)]
    file = file_of(tmp_path, *lines, "", line(custom_id="123"))
    with pytest.raises(ConfigInvalid, match=r"lines 124 and 1002 .* '123'"):
        file.examine()
    file.close()


def test_names_that_only_hash_alike_are_different(tmp_path, monkeypatch):
    monkeypatch.setattr("xxhash.xxh3_64_intdigest", lambda data: 7)
    file = file_of(tmp_path, line(), line(custom_id="b"))
    assert file.examine().num_requests == 2
    file.close()


def test_any_change_of_the_file_shows(tmp_path):
    seen = set()
    for text in (
        line(),
        line() + " ",
        line() + "\n",
        line(custom_id="b"),
        line() + "\n{" + "x" * 9000,
    ):
        file = file_of(tmp_path, text)
        seen.add(file.examine().sha256)
        file.close()
    assert len(seen) == 5


def test_memory_does_not_grow_with_the_file_nor_with_a_line_that_is_too_long(tmp_path):
    with (tmp_path / "in").open("w") as out:
        out.write("x" * 30_000_000 + "\n")
        for number in range(20_000):
            out.write(line(custom_id=str(number), body={"prompt": "y" * 300}) + "\n")
    file = InputFile(tmp_path / "in", 1000)
    tracemalloc.start()
    assert file.examine().num_requests == 20_000
    assert sum(1 for _ in file.requests(lambda number: True)) == 20_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4_000_000, "a read of 1 MiB, and a few dozen bytes for each name"
    file.close()


def test_a_file_that_is_not_there_or_is_a_pipe_is_refused(tmp_path):
    with pytest.raises(ConfigInvalid, match="No such file"):
        InputFile(tmp_path / "none", 100)
    read, write = os.pipe()
    with pytest.raises(ConfigInvalid, match="only once"):
        InputFile(Path(f"/proc/self/fd/{read}"), 100)
    os.close(read)
    os.close(write)
