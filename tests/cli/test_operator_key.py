from tandem.cli.main import run
from tandem.wire.keys import operator_key


def test_operator_key_prints_only_the_derived_key(monkeypatch, capsys):
    monkeypatch.setenv("TANDEM_CLUSTER_KEY", "s3cret")
    assert run(["operator-key"]) == 0
    assert capsys.readouterr().out == f"{operator_key('s3cret')}\n"


def test_operator_key_without_secret_fails_with_remedy(monkeypatch, capsys):
    monkeypatch.delenv("TANDEM_CLUSTER_KEY", raising=False)
    assert run(["operator-key"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert "TANDEM_CLUSTER_KEY is not set" in error
