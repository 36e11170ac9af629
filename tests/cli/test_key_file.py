import pytest

from tandem.cli.main import main, read_key_file
from tandem.wire.errors import ConfigInvalid
from tandem.wire.keys import operator_key


def test_command_reads_the_secret_from_a_file(tmp_path, monkeypatch, capsys):
    file = tmp_path / "key"
    file.write_text("s3cret\n")
    # The command sets this variable. Setting it here makes monkeypatch restore it after the test.
    monkeypatch.setenv("TANDEM_CLUSTER_KEY", "")
    monkeypatch.setenv("TANDEM_CLUSTER_KEY_FILE", str(file))
    monkeypatch.setattr("sys.argv", ["tandem", "operator-key"])
    assert main() == 0
    assert capsys.readouterr().out == f"{operator_key('s3cret')}\n"


def test_child_process_does_not_see_both_variables(tmp_path):
    file = tmp_path / "key"
    file.write_text("s3cret")
    environment = {"TANDEM_CLUSTER_KEY_FILE": str(file)}
    read_key_file(environment)
    read_key_file(environment)
    assert environment == {"TANDEM_CLUSTER_KEY": "s3cret"}


@pytest.mark.parametrize(
    ("content", "key", "sentence"),
    [
        (None, "", "cannot be read: .*No such file"),
        (b"\n", "", "is empty: write the output of"),
        (b"\xff\xfe", "", "cannot be read: .*utf-8"),
        (b"s3cret", "another", "are both set"),
    ],
)
def test_invalid_key_file_is_rejected_with_remedy(tmp_path, content, key, sentence):
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    environment = {"TANDEM_CLUSTER_KEY_FILE": str(file), "TANDEM_CLUSTER_KEY": key}
    with pytest.raises(ConfigInvalid, match=sentence):
        read_key_file(environment)
