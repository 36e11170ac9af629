import pytest

from tandem.cli.main import MODULES, REMOVED, run
from tandem.settings.parser import _REMOVED as REMOVED_FLAGS


@pytest.mark.parametrize("name", REMOVED)
def test_removed_command_exits_with_2_and_one_sentence(name, capsys):
    assert run([name, "--some-flag"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error == f"tandem: error: tandem {name} was removed: {REMOVED[name]}\n"
    assert name not in MODULES


@pytest.mark.parametrize("words", [words for words in REMOVED_FLAGS if " " in words])
def test_a_removed_flag_of_a_command_is_refused_in_one_sentence(words, capsys):
    _, name, flag = words.split()
    arguments = ["in.jsonl"] if name == "batch" else []
    with pytest.raises(SystemExit) as exit_status:
        run([name, *arguments, flag])
    assert exit_status.value.code == 2
    instead = REMOVED_FLAGS[words]
    assert capsys.readouterr().err == f"tandem {name}: error: {flag} was removed: {instead}\n"
