"""The journal, whatever is left of its file."""

import errno
import fcntl
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.batch.journal import Journal, JournalUnfit, write_outputs

SHA = "ab" * 32


def opened(path, num_requests=10, sha=SHA) -> Journal:
    return Journal.open(path, sha, num_requests)


def filled(path, *numbers) -> None:
    journal = opened(path)
    for number in numbers:
        journal.append(number, b'{"answer":%d}' % number)
    journal.close()


def done(path) -> list[int]:
    journal = opened(path)
    numbers = [number for number in range(10) if journal.is_done(number)]
    assert journal.num_done == len(numbers)
    journal.close()
    return numbers


def test_what_was_appended_is_there_when_it_is_opened_again_and_comes_in_order(tmp_path):
    path = tmp_path / "j"
    filled(path, 3, 1, 9, 0)
    filled(path, 2, 8, 7, 6, 5, 4)
    journal = opened(path)
    assert list(journal.results()) == [b'{"answer":%d}\n' % number for number in range(10)]
    journal.close()


def test_a_run_keeps_its_name(tmp_path):
    path = tmp_path / "j"
    first = opened(path)
    first.close()
    second = opened(path)
    assert first.run == second.run
    second.close()
    path.unlink()
    third = opened(path)
    assert third.run != first.run
    third.close()


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_however_short_the_file_is_cut_all_whole_lines_count_and_it_can_be_gone_on_with(
    data, tmp_path_factory
):
    path = tmp_path_factory.mktemp("cut") / "j"
    filled(path, 4, 2, 7)
    whole = path.read_bytes()
    size = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:size])
    num_whole = max(0, whole[:size].count(b"\n") - 1)
    assert done(path) == sorted([4, 2, 7][:num_whole])
    filled(path, 5)
    assert done(path) == sorted([*[4, 2, 7][:num_whole], 5])


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_line_that_is_not_what_was_written_does_not_count(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("bad") / "j"
    filled(path, 4, 2, 7)
    lines = path.read_bytes().splitlines(keepends=True)
    at = data.draw(st.integers(0, len(lines[2]) - 2))
    bad = bytearray(lines[2])
    bad[at] ^= data.draw(st.sampled_from([1, 2, 4, 8, 64]))
    path.write_bytes(lines[0] + lines[1] + bytes(bad) + lines[3])
    journal = opened(path)
    assert [number for number in range(10) if journal.is_done(number)] == [4, 7]
    assert journal.num_corrupt >= 1
    journal.close()


def test_the_journal_of_another_input_is_refused_with_what_to_do(tmp_path):
    filled(tmp_path / "j", 1)
    with pytest.raises(JournalUnfit, match="--restart"):
        opened(tmp_path / "j", sha="cd" * 32)
    assert done(tmp_path / "j") == [1], "it is left as it was"


def test_a_file_that_is_no_journal_is_not_touched(tmp_path):
    (tmp_path / "j").write_text("my thesis\n")
    with pytest.raises(JournalUnfit, match="no journal"):
        opened(tmp_path / "j")
    assert (tmp_path / "j").read_text() == "my thesis\n"


def test_two_commands_cannot_write_one_journal(tmp_path):
    first = opened(tmp_path / "j")
    with pytest.raises(JournalUnfit, match="in use"):
        opened(tmp_path / "j")
    with pytest.raises(JournalUnfit, match="in use"):
        Journal.open(tmp_path / "j", SHA, 10, is_restarted=True)
    first.append(1, b"{}")
    first.close()
    assert done(tmp_path / "j") == [1]


def test_a_journal_that_another_command_is_done_with_is_not_written(tmp_path, monkeypatch):
    path = tmp_path / "j"
    lock = fcntl.flock

    def end_other_and_lock(file, how):
        path.unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", end_other_and_lock)
    with pytest.raises(JournalUnfit, match="was in use until now"):
        opened(path)


def test_begun_again_it_has_nothing_of_before_whatever_it_was_of(tmp_path):
    filled(tmp_path / "j", 1, 2)
    journal = Journal.open(tmp_path / "j", "cd" * 32, 3, is_restarted=True)
    assert (journal.num_done, journal.is_done(1)) == (0, False)
    journal.close()


def test_a_full_disk_leaves_nothing_of_a_result_that_did_not_fit(tmp_path, monkeypatch):
    path = tmp_path / "j"
    filled(path, 1)
    journal = opened(path)
    real = journal._file

    class Full:
        """Takes five bytes more."""

        left = 5

        def write(self, data):
            if not self.left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken, self.left = real.write(data[: self.left]), 0
            return taken

        def __getattr__(self, name):
            return getattr(real, name)

    journal._file = Full()
    with pytest.raises(OSError, match="No space left"):
        journal.append(2, b"{}")
    assert not journal.is_done(2)
    journal.close()
    assert path.read_bytes().endswith(b"\n")
    assert done(path) == [1]


def test_outputs_are_whole_or_not_there(tmp_path):
    output, errors = tmp_path / "out", tmp_path / "err"
    output.write_text("of before")

    def failing():
        yield b"1\n"
        raise OSError(errno.EIO, "gone")

    with pytest.raises(OSError, match="gone"):
        write_outputs(failing(), output, errors, lambda line: True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert output.read_text() == "of before"
    write_outputs([b"1\n", b"2\n", b"3\n"], output, errors, lambda line: line != b"2\n")
    assert (output.read_bytes(), errors.read_bytes()) == (b"1\n3\n", b"2\n")
    write_outputs([b"1\n", b"2\n"], output, None, lambda line: line != b"2\n")
    assert output.read_bytes() == b"1\n2\n"
