from tandem.__main__ import run
from tandem.wire.keys import operator_key


def test_the_key_is_that_of_the_clusters_secret_and_nothing_else_is_printed(monkeypatch, capsys):
    monkeypatch.setenv("TANDEM_CLUSTER_KEY", "s3cret")
    assert run(["operator-key"]) == 0
    assert capsys.readouterr().out == f"{operator_key('s3cret')}\n"


def test_without_a_secret_there_is_no_key_and_what_to_do_is_told(monkeypatch, capsys):
    monkeypatch.delenv("TANDEM_CLUSTER_KEY", raising=False)
    assert run(["operator-key"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert "TANDEM_CLUSTER_KEY is not set" in error
