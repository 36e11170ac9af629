import sys

import pytest
from rich.console import Console
from rich.text import Text

from tandem.router.arguments import parse
from tandem.up import Cluster, Member, Screen, build_parser, free_ports, main, members
from tests.certificates import make_certificates


def cluster(*argv: str, num_cores: int = 2):
    return members(build_parser(), argv, list(range(9000, 9100)), num_cores)


def test_a_pair_and_a_router_are_what_one_gets():
    prefill, decode, router = cluster()
    assert prefill.argv[:5] == ["prefill", "--port", "9000", "--bootstrap-port", "9001"]
    assert decode.argv[:3] == ["decode", "--port", "9002"]
    assert router.argv[:5] == ["lb", "--prefill", "http://127.0.0.1:9000", "9001", "--decode"]


def test_flags_that_mean_nothing_to_nodes_are_taken_for_them_as_by_their_own_commands():
    prefill, decode, router = cluster("--enable-metrics", "--stream-interval", "5")
    for node in (prefill, decode):
        assert node.argv[-3:] == ["--enable-metrics", "--stream-interval", "5"]
    assert "--enable-metrics" not in router.argv


def test_each_flag_goes_to_the_processes_that_it_is_of(tmp_path, monkeypatch):
    path = tmp_path / "flags.yaml"
    path.write_text("max-queued-requests: 10\npage-size: 32\n")
    monkeypatch.setenv("TANDEM_HEARTBEAT_INTERVAL_MS", "250")
    prefill, decode, router = cluster(
        "--config", str(path), "--log-level", "debug", "--no-admission"
    )
    read = parse(router.argv[1:])
    assert (read.admission.limits.max_requests, read.admission.is_on) == (10, False)
    assert (read.heartbeat_interval_ms, read.log_level) == (250.0, "debug")
    for node in (prefill, decode):
        assert "--page-size=32" in node.argv
        assert "--heartbeat-interval-ms=250" in node.argv
        assert node.argv[node.argv.index("--log-level") + 1] == "debug"
        assert not any("queued" in word or "admission" in word for word in node.argv)


def test_a_chat_template_goes_to_the_router_and_to_the_nodes(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }}")
    assert all(
        f"--chat-template={path}" in each.argv for each in cluster(f"--chat-template={path}")
    )


def test_secrets_that_are_on_no_command_line_are_put_on_none(tmp_path, monkeypatch):
    path = tmp_path / "flags.yaml"
    path.write_text("kv-tier: ['redis://:s3cret@10.0.0.1/0', host:1GiB]\n")
    monkeypatch.setenv("TANDEM_API_KEY", "s3cret-1 's3cret 2'")
    *nodes, router = cluster("--config", str(path))
    assert router.secrets == {"TANDEM_API_KEY": "s3cret-1 's3cret 2'"}
    for node in nodes:
        assert node.secrets == {"TANDEM_KV_TIER": "redis://:s3cret@10.0.0.1/0 host:1GiB"}
    for member in (*nodes, router):
        assert "s3cret" not in " ".join(member.argv)


async def test_a_log_line_of_any_length_does_not_end_the_cluster(capsys, monkeypatch):
    command = (sys.executable, "-c", "import sys; print(sys.argv[1] * 200_000); sys.exit(3)")
    monkeypatch.setattr("tandem.up.COMMAND", command)
    member = Member("long", ["x"])
    cluster = Cluster([member], Screen(Console(width=80), ["long"], None))
    await cluster._member(member)
    out, err = capsys.readouterr()
    assert out.count("x") == 200_000
    assert "long: ended with status 3" in err


def test_the_terminal_shows_who_is_ready_and_what_is_wrong_and_the_file_everything(
    capsys, tmp_path
):
    routine, warning = "10:00:00 [info     ] node.up", "10:00:01 [warning  ] node.lost"
    trace = "Traceback (most recent call last):"
    with (
        (tmp_path / "log").open("w") as log,
        Screen(Console(width=80), ["router", "decode-0"], log) as screen,
    ):
        for line in (routine, warning, trace):
            screen.line("router", Text(line))
        screen.ready("decode-0")
        screen.banner("http://localhost:8000")
    out = capsys.readouterr().out
    assert routine not in out
    assert f"router   │ {warning}\n" in out
    assert trace in out
    assert "decode-0   ready after" in out
    assert f"log: {log.name}" in "".join(out.split("\n")[-3:])
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == [f"router   │ {line}" for line in (routine, warning, trace)]


def test_a_nodes_row_shows_the_percentage_of_its_download(tmp_path):
    events = ("model.downloading    model=org/m percent=42 total_mb=7", "model.resolved  commit=5")
    with (
        (tmp_path / "log").open("w") as log,
        Screen(Console(width=80), ["decode-0"], log) as screen,
    ):
        shown = []
        for event in events:
            screen.line("decode-0", Text(f"10:00:00 [info     ] {event}"))
            shown.append(screen._progress.tasks[0].description)
    assert shown == ["decode-0 downloads: 42 %", "decode-0 starts"]


def test_a_misspelt_flag_of_a_node_is_answered_before_anything_starts(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--pagesize", "32"])
    answer = "tandem up: error: there is no flag --pagesize: did you mean --page-size?\n"
    assert capsys.readouterr().err == answer


def test_free_ports_are_distinct_and_none_that_the_kernel_gives_to_a_client():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert max(ports) < 32768


def test_flags_of_http_go_to_the_router_and_leave_the_nodes_open_to_it(tmp_path):
    certificates = make_certificates(tmp_path)
    keys = tmp_path / "keys"
    keys.write_text("sk-2\n")
    prefill, decode, router = cluster(
        *("--api-key=-sk-1", "--api-key-file", str(keys), "--max-body-bytes", "1000"),
        *("--request-timeout-s", "2.5", "--cors-allow-origin", "https://a.example"),
        *("--ssl-certfile", certificates.cert, "--ssl-keyfile", certificates.key),
    )
    http = parse(router.argv[1:]).http
    assert http.api_keys == ("-sk-1", "sk-2")
    assert (http.max_body_bytes, http.request_timeout_s) == (1000, 2.5)
    assert http.cors_origins == ("https://a.example",)
    assert http.tls is not None
    assert http.tls.certfile == certificates.cert
    for node in (prefill, decode):
        assert not any(
            text.startswith(("--api-key", "--ssl", "--max-body", "--request-timeout", "--cors"))
            for text in node.argv
        )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--ssl-certfile", "/nowhere"), "--ssl-certfile /nowhere: No such file"),
        (("--max-body-bytes", "0"), "give at least 1"),
        (("--ssl-certfile", "CERT", "--ssl-keyfile", "KEY", "--ssl-ca-certs", "CA"), "one by one"),
    ],
)
def test_http_that_cannot_work_is_refused_before_anything_starts(tmp_path, capsys, argv, said):
    made = make_certificates(tmp_path)
    paths = {"CERT": made.cert, "KEY": made.key, "CA": made.ca}
    with pytest.raises(SystemExit, match="2"):
        main([paths.get(text, text) for text in argv])
    assert said in " ".join(capsys.readouterr().err.split())
