from tandem import long_work


def test_where_nobody_sees_a_bar_a_line_comes_now_and_then(monkeypatch, capsys):
    now_s = [0.0]
    monkeypatch.setattr(long_work.time, "monotonic", lambda: now_s[0])
    with long_work.counted("fleets", 9) as advance:
        for done in range(9):
            advance(done, f"number {done}")
            now_s[0] += 2.0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["fleets: 3/9 · number 3", "fleets: 6/9 · number 6"]
