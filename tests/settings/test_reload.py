import os

import pytest

from tandem.settings.flags import SettingInvalid
from tandem.settings.reload import ReloadedFiles


class Loaded:
    """The content of a file, which must be a number."""

    def __init__(self, path) -> None:
        self.path, self.num_loads, self.value = path, 0, 0

    def load(self) -> None:
        self.num_loads += 1
        try:
            self.value = int(self.path.read_text())
        except (OSError, ValueError) as error:
            raise SettingInvalid(f"not a number: {type(error).__name__}") from error


@pytest.fixture
def loaded(tmp_path) -> Loaded:
    (tmp_path / "number").write_text("1")
    return Loaded(tmp_path / "number")


def test_file_is_loaded_at_once_and_again_only_when_it_changes(loaded):
    files = ReloadedFiles([str(loaded.path)], loaded.load)
    assert not files.refresh()
    assert (loaded.value, loaded.num_loads) == (1, 1)
    loaded.path.write_text("22")
    assert files.refresh()
    assert not files.refresh()
    assert (loaded.value, loaded.num_loads) == (22, 2)


def test_file_rewritten_in_place_within_a_second_is_a_change(loaded):
    os.utime(loaded.path, ns=(10**18, 10**18))
    files = ReloadedFiles([str(loaded.path)], loaded.load)
    loaded.path.write_text("2")
    os.utime(loaded.path, ns=(10**18, 10**18 + 1000))
    assert files.refresh()
    assert loaded.value == 2


def test_replaced_target_of_a_link_is_a_change(loaded, tmp_path):
    """As Kubernetes replaces the files of a Secret: by one link to another folder."""
    (tmp_path / "new").write_text("2")
    link = tmp_path / "link"
    link.symlink_to(loaded.path)
    loaded.path = link
    files = ReloadedFiles([str(link)], loaded.load)
    (tmp_path / "next").symlink_to(tmp_path / "new")
    os.replace(tmp_path / "next", link)
    assert files.refresh()
    assert loaded.value == 2


@pytest.mark.parametrize("spoil", ["missing", "invalid"])
def test_invalid_content_is_reported_once_and_read_again_until_it_is_valid(loaded, spoil):
    files = ReloadedFiles([str(loaded.path)], loaded.load)
    if spoil == "missing":
        loaded.path.unlink()
    else:
        loaded.path.write_text("none")
    assert [files.refresh() for _ in range(3)] == [True, False, False]
    assert "not a number" in files.problem
    assert loaded.value == 1
    loaded.path.write_text("333")
    assert files.refresh()
    assert (files.problem, loaded.value) == ("", 333)


def test_invalid_content_at_the_start_is_an_error(loaded):
    loaded.path.write_text("none")
    with pytest.raises(SettingInvalid):
        ReloadedFiles([str(loaded.path)], loaded.load)
