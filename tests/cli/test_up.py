import json
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from tandem.cli.processes import ChildProcess, Processes, Screen, read_output
from tandem.cli.up import (
    NodePlacement,
    build_parser,
    describe_placement,
    free_ports,
    main,
    members,
    place_nodes,
)
from tandem.frontend.options import read_keys
from tandem.node.flags import build_parser as build_node_parser
from tandem.node.flags import read_options
from tandem.router.arguments import parse
from tandem.router.config import PrefillTarget
from tandem.wire.errors import ConfigInvalid
from tests.certificates import make_certificates


def cluster(*argv: str, num_cores: int = 2):
    return members(build_parser(), argv, list(range(9000, 9100)), num_cores)


def event(name: str, level: str = "info", **fields: object) -> str:
    return json.dumps(
        {"event": name, "level": level, "timestamp": "2026-01-01T10:00:00Z", **fields}
    )


def router_config(router: ChildProcess):
    with tempfile.TemporaryDirectory() as directory:
        return parse(router.with_file(directory).argv[1:])


def test_default_cluster_is_one_pair_and_a_router():
    prefill, decode, router = cluster()
    assert [each.argv for each in (prefill, decode, router)] == [["prefill"], ["decode"], ["lb"]]
    assert (prefill.settings["port"], prefill.settings["bootstrap-port"]) == (9000, 9001)
    assert decode.settings["port"] == 9002
    read = router_config(router)
    assert read.prefills == (PrefillTarget("http://127.0.0.1:9000", 9001),)
    assert read.decodes == ("http://127.0.0.1:9002",)


def test_processes_have_the_defaults_of_their_own_commands():
    own = {"port", "bootstrap-port", "num-threads", "log-format", "prefill", "decode", "device"}
    for process in cluster("--device", "cpu"):
        assert process.settings.keys() <= own


def read_node(node: ChildProcess, role: str):
    with tempfile.TemporaryDirectory() as directory:
        argv = node.with_file(directory).argv[1:]
        return read_options(build_node_parser("tandem", role, "", 0), role, argv)


def test_ignored_node_flags_are_passed_to_nodes_only():
    prefill, decode, router = cluster("--enable-metrics", "--enable-p2p-check")
    for node in (prefill, decode):
        assert read_node(node, "prefill")[1] == ["--enable-metrics", "--enable-p2p-check"]
    assert not {"enable-metrics", "enable-p2p-check"} & router.settings.keys()


def test_each_flag_goes_to_the_processes_that_have_it(tmp_path, monkeypatch):
    path = tmp_path / "flags.yaml"
    path.write_text("max-queued-requests: 10\npage-size: 32\n")
    monkeypatch.setenv("TANDEM_HEARTBEAT_INTERVAL_MS", "250")
    prefill, decode, router = cluster(
        "--config", str(path), "--log-level", "debug", "--no-admission"
    )
    read = router_config(router)
    assert (read.admission.limits.max_requests, read.admission.is_on) == (10, False)
    assert (read.heartbeat_interval_ms, read.log_level) == (250.0, "debug")
    for node in (prefill, decode):
        config, _ = read_node(node, "prefill")
        assert (config.engine.page_size, config.log_level) == (32, "debug")
        assert config.heartbeat_interval_ms == 250.0
        assert not any("queued" in name or "admission" in name for name in node.settings)


def test_chat_template_goes_to_router_and_nodes(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }}")
    for member in cluster(f"--chat-template={path}"):
        assert member.settings["chat-template"] == str(path)


def test_settings_file_keeps_aliases_switches_and_lists(tmp_path):
    argv = [
        "--block-size",
        "32",
        "--no-kv-checksum",
        "--disable-cuda-graph",
        "--gpu-memory-utilization=0.5",
    ]
    tiers = ["--kv-tier", "host:1GiB", "--hicache-size", "0", "--kv-tier=disk:/d:1GiB"]
    expected, _ = read_node(ChildProcess("n", ["prefill"]), "prefill")
    node, *_ = cluster(*argv, *tiers)
    made, _ = read_node(node, "prefill")
    direct, _ = read_options(
        build_node_parser("tandem", "prefill", "", 0), "prefill", [*argv, *tiers]
    )
    assert made.tiers == direct.tiers
    assert made.transfer.verify == direct.transfer.verify == "off" != expected.transfer.verify
    assert (made.engine.page_size, made.engine.mem_fraction_static) == (32, 0.5)
    assert made.engine.is_eager is direct.engine.is_eager is not expected.engine.is_eager


def test_arguments_of_vllm_follow_the_settings_file(tmp_path):
    node, _, router = cluster("--page-size", "32", "--", "--enable-x", "3")
    path = str(tmp_path / "prefill-0.yaml")
    assert node.with_file(str(tmp_path)).argv == [
        "prefill",
        "--config",
        path,
        "--",
        "--enable-x",
        "3",
    ]
    assert router.argv == ["lb"]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("page-size: 0", "page-size: --page-size/--block-size is 0"),
        ("port: 70000", "port: --port is 70000"),
    ],
)
def test_invalid_value_is_reported_with_the_file_of_the_operator(tmp_path, capsys, flag, message):
    path = tmp_path / "flags.yaml"
    path.write_text(flag)
    with pytest.raises(SystemExit, match="2"):
        main(["--config", str(path)])
    assert f"tandem up: error: {path}: {message}" in capsys.readouterr().err


def test_secrets_are_only_in_files_of_this_user(tmp_path, monkeypatch):
    path = tmp_path / "flags.yaml"
    path.write_text("kv-tier: ['redis://:s3cret@10.0.0.1/0', host:1GiB]\n")
    monkeypatch.setenv("TANDEM_API_KEY", "s3cret-1 s3cret-2")
    *nodes, router = cluster("--config", str(path))
    assert router.settings["api-key"] == ["s3cret-1", "s3cret-2"]
    for node in nodes:
        assert node.settings["kv-tier"] == ["redis://:s3cret@10.0.0.1/0", "host:1GiB"]
    for member in (*nodes, router):
        argv = member.with_file(str(tmp_path)).argv
        assert "s3cret" not in " ".join(argv)
        assert "s3cret" in Path(argv[2]).read_text()
        assert stat.S_IMODE(Path(argv[2]).stat().st_mode) == 0o600
    *_, router = cluster("--api-key", "s3cret-3")
    assert "s3cret" not in " ".join(router.argv)


async def test_very_long_log_line_does_not_stop_the_cluster(capsys, monkeypatch):
    command = (sys.executable, "-c", "import sys; print(sys.argv[1] * 200_000); sys.exit(3)")
    monkeypatch.setattr("tandem.cli.processes.COMMAND", command)
    member = ChildProcess("long", ["x"])
    cluster = Processes("tandem up", [member], Screen(Console(width=80), ["long"], None), 30.0)
    await cluster._member(member)
    out, err = capsys.readouterr()
    assert out.count("x") == 200_000
    assert "long: exited with status 3" in err


def test_terminal_shows_readiness_and_warnings_and_the_log_file_everything(capsys, tmp_path):
    routine, warning = event("node.up"), event("node.lost", level="warning", exception="A\nB")
    trace = "Traceback (most recent call last):"
    with (
        (tmp_path / "log").open("w") as log,
        Screen(Console(width=80), ["router", "decode-0"], log) as screen,
    ):
        for line in (routine, warning, trace):
            screen.line("router", read_output(line, "console"))
        screen.ready("decode-0")
        screen.banner("http://localhost:8000", has_page=True)
    out = capsys.readouterr().out
    assert "node.up" not in out
    assert re.search(r"router   │ \d\d:\d\d:\d\d \[warning  \] node.lost", out)
    assert trace in out
    assert "decode-0   ready after" in out
    assert f"log: {log.name}" in "".join(out.split("\n")[-3:])
    lines = (tmp_path / "log").read_text().splitlines()
    shown = ["[info     ] node.up", "[warning  ] node.lost", "A", "B", trace]
    assert all(line.startswith("router   │ ") for line in lines)
    assert [line.strip().endswith(text) for line, text in zip(lines, shown, strict=True)] == [
        True
    ] * 5


@pytest.mark.parametrize("is_on_path", [False, True])
def test_command_of_the_banner_runs_in_a_new_shell(tmp_path, monkeypatch, capsys, is_on_path):
    tools = tmp_path / "venv" / "bin"
    tools.mkdir(parents=True)
    (tools / "activate").write_text(f"PATH={tools}:$PATH\n")
    (tools / "tandem").write_text("#!/bin/sh\necho shown: $*\n")
    (tools / "tandem").chmod(0o755)
    path = f"{tools}:/usr/bin:/bin" if is_on_path else "/usr/bin:/bin"
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setenv("PATH", path)
    monkeypatch.chdir(tmp_path)
    with Screen(Console(width=80), ["router"], None) as screen:
        screen.banner("http://localhost:8000", has_page=True)
    command = re.search("in a browser, or (.*)", capsys.readouterr().out)[1]
    assert command.startswith("tandem top" if is_on_path else ". venv/bin/activate && tandem top")
    shell = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=True)
    assert shell.stdout == "shown: top http://localhost:8000\n"


def test_json_log_format_shows_the_lines_of_processes_unchanged():
    line = event("node.lost", level="warning")
    assert read_output(line, "json").text.plain == line
    assert "node.lost" in read_output(line, "auto").text.plain != line


def test_node_row_shows_download_percentage(tmp_path):
    events = (event("model.downloading", percent=42), event("model.resolved", commit="5"))
    with (
        (tmp_path / "log").open("w") as log,
        Screen(Console(width=80), ["decode-0"], log) as screen,
    ):
        shown = []
        for line in events:
            screen.line("decode-0", read_output(line, "console"))
            shown.append(screen._progress.tasks[0].description)
    assert shown == ["decode-0 downloads: 42 %", "decode-0 starts"]


def test_processes_have_the_time_that_the_router_takes_to_stop(monkeypatch):
    drains = []
    monkeypatch.setattr(
        "tandem.cli.up.run",
        lambda _name, _processes, drain_s, **_options: drains.append(drain_s) or 0,
    )
    assert main(["--shutdown-delay-s", "7", "--drain-timeout-s", "5"]) == 0
    assert drains == [12.0]


def test_misspelt_node_flag_is_rejected_before_start(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--pagesize", "32"])
    answer = "tandem up: error: there is no flag --pagesize: did you mean --page-size?\n"
    assert capsys.readouterr().err == answer


def test_free_ports_leave_room_for_ranks_and_avoid_ephemeral_ports():
    ports = sorted(free_ports(200))
    assert all(later - port >= 16 for port, later in pairwise(ports))
    assert ports[-1] + 16 < 32768


def test_more_nodes_than_ports_are_rejected(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--decodes", "1000"])
    assert "no 1002 free ports" in capsys.readouterr().err


def test_http_flags_go_to_the_router_only(tmp_path):
    certificates = make_certificates(tmp_path)
    keys = tmp_path / "keys"
    keys.write_text("sk-2\n")
    prefill, decode, router = cluster(
        *("--api-key=-sk-1", "--api-key-file", str(keys), "--max-body-bytes", "1000"),
        *("--request-timeout-s", "2.5", "--cors-allow-origin", "https://a.example"),
        *("--ssl-certfile", certificates.cert, "--ssl-keyfile", certificates.key),
    )
    http = router_config(router).http
    assert read_keys(http) == ("-sk-1", "sk-2")
    assert (http.max_body_bytes, http.request_timeout_s) == (1000, 2.5)
    assert http.cors_origins == ("https://a.example",)
    assert http.tls is not None
    assert http.tls.certfile == certificates.cert
    for node in (prefill, decode):
        assert not any(
            name.startswith(("api-key", "ssl", "max-body", "request-timeout", "cors", "allowed"))
            for name in node.settings
        )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--ssl-certfile", "/nowhere"), "--ssl-certfile /nowhere: No such file"),
        (("--max-body-bytes", "0"), "use at least 1"),
        (("--ssl-certfile", "CERT", "--ssl-keyfile", "KEY", "--ssl-ca-certs", "CA"), "one by one"),
    ],
)
def test_invalid_http_flags_are_rejected_before_start(tmp_path, capsys, argv, message):
    made = make_certificates(tmp_path)
    paths = {"CERT": made.cert, "KEY": made.key, "CA": made.ca}
    with pytest.raises(SystemExit, match="2"):
        main([paths.get(text, text) for text in argv])
    assert message in " ".join(capsys.readouterr().err.split())


# ── place_nodes on GPUs ───────────────────────────────────────────────────────────────────────────────


def test_nodes_are_spread_over_gpus_and_share_memory_on_one_gpu():
    assert place_nodes(2, 0, 1, 0.85) == [NodePlacement()] * 2
    assert [place.settings for place in place_nodes(2, 4, 1, 0.85)] == [
        {"device": "cuda:0", "mem-fraction-static": 0.85},
        {"device": "cuda:1", "mem-fraction-static": 0.85},
    ]
    assert [place.settings for place in place_nodes(3, 2, 1, 0.8)] == [
        {"device": "cuda:0", "mem-fraction-static": 0.4},
        {"device": "cuda:1", "mem-fraction-static": 0.8},
        {"device": "cuda:0", "mem-fraction-static": 0.4},
    ]
    *nodes, _ = members(build_parser(), (), list(range(9000, 9100)), 2, num_gpus=1)
    assert [describe_placement(node) for node in nodes] == [
        "prefill-0   on cuda:0, with 0.425 of its memory",
        "decode-0    on cuda:0, with 0.425 of its memory",
    ]


def test_each_tensor_parallel_node_sees_only_its_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in place_nodes(2, 4, 2, 0.85)] == [
        "0,1",
        "2,3",
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in place_nodes(2, 4, 2, 0.85)] == [
        "4,5",
        "6,7",
    ]
    with pytest.raises(ConfigInvalid, match="take 4 GPUs and there are 3"):
        place_nodes(2, 3, 2, 0.85)


@pytest.mark.parametrize(
    ("argv", "device"),
    [
        ((), "cuda:0"),
        (("--device", "cpu"), "cpu"),
        (("--device", "cuda:3"), "cuda:3"),
        (("--engine", "simulated"), "auto"),
    ],
)
def test_device_flag_overrides_the_placement(argv, device):
    prefill, _, _ = members(build_parser(), argv, list(range(9000, 9100)), 2, num_gpus=2)
    assert prefill.settings.get("device", "auto") == device


# ── the end ──────────────────────────────────────────────────────────────────────────────────────


async def test_process_exit_is_reported_with_its_last_line(capsys, monkeypatch):
    code = "import os, sys; print('RuntimeError: no memory', flush=True); os.kill(os.getpid(), 9)"
    monkeypatch.setattr("tandem.cli.processes.COMMAND", (sys.executable, "-c", code))
    member = ChildProcess("decode-0", ["x"])
    screen = Screen(Console(width=80), ["decode-0"], None)
    assert await Processes("tandem up", [member], screen, 30.0).run() == 1
    message = "tandem up: error: decode-0: killed by SIGKILL: RuntimeError: no memory; stopping\n"
    assert capsys.readouterr().err == message


def test_port_in_use_is_rejected_naming_the_process_before_start(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match="2"):
            main(["--port", str(port)])
    message = capsys.readouterr().err
    assert f"port {port} on 127.0.0.1 is in use by process {os.getpid()} (" in message
    assert "use a different --port, or stop that process" in message
