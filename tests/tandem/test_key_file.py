import pytest

from tandem.__main__ import main, take_key_file
from tandem.wire.errors import ConfigInvalid
from tandem.wire.keys import operator_key


def test_every_command_takes_the_clusters_secret_from_a_file(tmp_path, monkeypatch, capsys):
    file = tmp_path / "key"
    file.write_text("s3cret\n")
    # The command sets it. Set it first, so that it is taken back after this test.
    monkeypatch.setenv("TANDEM_CLUSTER_KEY", "")
    monkeypatch.setenv("TANDEM_CLUSTER_KEY_FILE", str(file))
    monkeypatch.setattr("sys.argv", ["tandem", "operator-key"])
    assert main() == 0
    assert capsys.readouterr().out == f"{operator_key('s3cret')}\n"


def test_a_process_that_inherits_the_secret_does_not_find_it_said_twice(tmp_path):
    file = tmp_path / "key"
    file.write_text("s3cret")
    environment = {"TANDEM_CLUSTER_KEY_FILE": str(file)}
    take_key_file(environment)
    take_key_file(environment)
    assert environment == {"TANDEM_CLUSTER_KEY": "s3cret"}


@pytest.mark.parametrize(
    ("content", "key", "sentence"),
    [
        (None, "", "cannot be read: .*No such file"),
        (b"\n", "", "is empty: fill it with"),
        (b"\xff\xfe", "", "cannot be read: .*utf-8"),
        (b"s3cret", "another", "are both set"),
    ],
)
def test_a_file_that_gives_no_secret_is_refused_with_what_to_do(tmp_path, content, key, sentence):
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    environment = {"TANDEM_CLUSTER_KEY_FILE": str(file), "TANDEM_CLUSTER_KEY": key}
    with pytest.raises(ConfigInvalid, match=sentence):
        take_key_file(environment)
