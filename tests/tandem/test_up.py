import os
import socket
import sys
from itertools import pairwise

import pytest
from rich.console import Console
from rich.text import Text

from tandem.node.flags import build_parser as build_node_parser
from tandem.processes import Member, Processes, Screen
from tandem.router.arguments import parse
from tandem.up import Place, build_parser, free_ports, main, members, places, stated
from tandem.wire.errors import ConfigInvalid
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
    assert router.environment == {"TANDEM_API_KEY": "s3cret-1 's3cret 2'"}
    for node in nodes:
        assert node.environment == {"TANDEM_KV_TIER": "redis://:s3cret@10.0.0.1/0 host:1GiB"}
    for member in (*nodes, router):
        assert "s3cret" not in " ".join(member.argv)


async def test_a_log_line_of_any_length_does_not_end_the_cluster(capsys, monkeypatch):
    command = (sys.executable, "-c", "import sys; print(sys.argv[1] * 200_000); sys.exit(3)")
    monkeypatch.setattr("tandem.processes.COMMAND", command)
    member = Member("long", ["x"])
    cluster = Processes("tandem up", [member], Screen(Console(width=80), ["long"], None), 30.0)
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
        screen.banner("http://localhost:8000", has_page=True)
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


def test_free_ports_leave_room_for_ranks_and_are_none_that_the_kernel_gives_to_a_client():
    ports = sorted(free_ports(200))
    assert all(later - port >= 16 for port, later in pairwise(ports))
    assert ports[-1] + 16 < 32768


def test_more_nodes_than_there_are_ports_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--decodes", "1000"])
    assert "no 1002 free ports" in capsys.readouterr().err


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


# ── places on GPUs ───────────────────────────────────────────────────────────────────────────────


def test_nodes_are_spread_over_gpus_and_those_that_share_one_split_its_memory():
    assert places(2, 0, 1, 0.85) == [Place()] * 2
    assert [place.flags for place in places(2, 4, 1, 0.85)] == [
        ["--device", "cuda:0", "--mem-fraction-static", "0.85"],
        ["--device", "cuda:1", "--mem-fraction-static", "0.85"],
    ]
    assert [place.flags for place in places(3, 2, 1, 0.8)] == [
        ["--device", "cuda:0", "--mem-fraction-static", "0.4"],
        ["--device", "cuda:1", "--mem-fraction-static", "0.8"],
        ["--device", "cuda:0", "--mem-fraction-static", "0.4"],
    ]
    *nodes, _ = members(build_parser(), (), list(range(9000, 9100)), 2, num_gpus=1)
    assert [stated(node) for node in nodes] == [
        "prefill-0   on cuda:0, with 0.425 of its memory",
        "decode-0    on cuda:0, with 0.425 of its memory",
    ]


def test_nodes_of_several_gpus_each_see_their_own(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in places(2, 4, 2, 0.85)] == [
        "0,1",
        "2,3",
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in places(2, 4, 2, 0.85)] == [
        "4,5",
        "6,7",
    ]
    with pytest.raises(ConfigInvalid, match="take 4 GPUs and there are 3"):
        places(2, 3, 2, 0.85)


@pytest.mark.parametrize(
    ("argv", "device"),
    [
        ((), "cuda:0"),
        (("--device", "cpu"), "cpu"),
        (("--device", "cuda:3"), "cuda:3"),
        (("--engine", "simulated"), "auto"),
    ],
)
def test_the_operators_device_wins_over_the_place(argv, device):
    prefill, _, _ = members(build_parser(), argv, list(range(9000, 9100)), 2, num_gpus=2)
    parser = build_node_parser("tandem", "prefill", "", 0)
    assert vars(parser.parse_args(prefill.argv[1:]))["engine.device"] == device


# ── the end ──────────────────────────────────────────────────────────────────────────────────────


async def test_the_end_of_a_process_is_reported_with_its_last_line(capsys, monkeypatch):
    code = "import os, sys; print('RuntimeError: no memory', flush=True); os.kill(os.getpid(), 9)"
    monkeypatch.setattr("tandem.processes.COMMAND", (sys.executable, "-c", code))
    member = Member("decode-0", ["x"])
    screen = Screen(Console(width=80), ["decode-0"], None)
    await Processes("tandem up", [member], screen, 30.0)._member(member)
    said = "tandem up: error: decode-0: killed by SIGKILL: RuntimeError: no memory; stopping\n"
    assert capsys.readouterr().err == said


def test_a_port_that_is_taken_is_refused_with_its_process_before_anything_starts(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match="2"):
            main(["--port", str(port)])
    said = capsys.readouterr().err
    assert f"port {port} on 127.0.0.1 is in use by process {os.getpid()} (" in said
    assert "choose another --port, or stop that process" in said
