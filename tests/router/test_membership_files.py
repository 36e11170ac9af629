from pathlib import Path

import pytest

from tandem.router.membership import Said
from tandem.router.membership_files import MemberFiles, MembersUnwritable, new_member_files

A = Said(url="http://a:1", role="decode", ttl_s=10.0, mark="1")
B = Said(url="http://b:1", bootstrap_port=8998, zone="z", mark="2")


@pytest.fixture
def files():
    with new_member_files() as made:
        yield made


def test_another_worker_reads_what_one_wrote_and_what_it_took_back(files):
    other = MemberFiles(str(files.directory))
    files.write(B)
    files.write(A)
    assert other.read() == {A.url: A, B.url: B}
    again = Said(url=A.url, is_removed=True, mark="3")
    files.write(again)
    assert other.read() == {A.url: again, B.url: B}
    other.forget(B)
    other.forget(B)
    assert files.read() == {A.url: again}


def test_what_a_worker_left_half_written_is_not_read(files):
    (files.directory / ".half.1").write_bytes(b'{"url": "http')
    assert files.read() == {}


def test_only_this_user_may_look_and_nothing_is_left_behind():
    with new_member_files() as made:
        assert made.directory.stat().st_mode & 0o077 == 0
    assert not made.directory.exists()


def test_what_cannot_be_kept_is_an_error_that_a_node_may_repeat(tmp_path: Path):
    files = MemberFiles(str(tmp_path / "gone"))
    with pytest.raises(MembersUnwritable, match="cannot keep") as raised:
        files.write(A)
    assert (raised.value.status, raised.value.is_retryable) == (503, True)
