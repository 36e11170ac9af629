"""`tandem plan`: tables, JSON, refusals, and the check of a plan by simulated engines."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tandem.__main__ import run
from tandem.engine.profile import DecodeTimes, NodeFigures, PrefillTimes, Profile
from tandem.parsers import parsers
from tandem.up import free_ports

ROOT = Path(__file__).parents[3]
LOAD = "--prompt 2000 --output 100 --rate 20"
GOALS = "--ttft-ms 1000 --itl-ms 20"
PROFILE = Profile(
    prefill=PrefillTimes(base_ms=5, per_token_ms=0.1),
    decode=DecodeTimes(base_ms=10, per_request_ms=0.1),
    node=NodeFigures(num_tokens=100_000, kv_bytes_per_token=1000, link_bytes_per_s=1e10),
)


@pytest.fixture
def node(tmp_path):
    file = tmp_path / "measured.json"
    file.write_bytes(msgspec.json.encode(PROFILE))
    return str(file)


def main(flags):
    return run(["plan", *flags.split()])


def planned(text, capsys):
    assert main(f"{text} --json") == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_is_a_sentence_and_a_table(node, capsys):
    assert main(f"--node {node} {LOAD} {GOALS}") == 0
    out, err = capsys.readouterr()
    assert "5 prefill x measured and 1 decode x measured, cost 6" in out
    assert "decode measured 1 1" in " ".join(out.split())
    assert max(map(len, out.splitlines()[2:])) <= 80
    assert "estimated" not in out
    assert err == ""


def test_estimates_are_marked(capsys):
    assert main(f"--model llama-8b --node h100 {LOAD} {GOALS}") == 0
    out = capsys.readouterr().out
    assert out.count("~h100") == 4
    assert "~ estimated from vendors' figures, not measured" in out


def test_goals_that_no_number_of_nodes_reaches_are_an_exit_status_and_a_reason(node, capsys):
    assert main(f"--node {node} {LOAD} --ttft-ms 100") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "No number of these nodes reaches the goals" in out
    assert main(f"--node {node} {LOAD} --ttft-ms 100 --json") == 1
    assert json.loads(capsys.readouterr().out)["best"] is None


def test_each_role_takes_the_kind_that_costs_least(capsys):
    asked = f"--model llama-8b --node h100 --node h100-tp2 {LOAD} {GOALS}"
    for cost, expected in ((0.5, "h100-tp2"), (50, "h100")):
        best = planned(f"{asked} --cost h100-tp2={cost}", capsys)["best"]
        assert best["prefill"]["kind"]["name"] == best["decode"]["kind"]["name"] == expected


def test_a_trace_is_planned_for(node, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 100 * i, "input_length": 1500, "output_length": 50, "hash_ids": [1, i, i + 1]}
        for i in range(2, 102)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    load = planned(f"--node {node} --trace {trace} --rate 20 --ttft-ms 800", capsys)["load"]
    assert (load["num_requests"], load["lasts_s"]) == (100, pytest.approx(5.0))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (LOAD, "there is no goal: give --ttft-ms"),
        (f"{LOAD} --ttft-ms 0", "--ttft-ms is 0: give at least"),
        (f"{LOAD} --ttft-ms 5 --percentile 101", "--percentile is 101: give 1 to 100"),
        ("--ttft-ms 5", "give --trace, or --prompt and --output and --rate"),
        ("--ttft-ms 5 --prompt 5 --output 5", "give --trace, or --rate"),
        ("--ttft-ms 5 --prompt five --output 5 --rate 1", "--prompt five: give tokens such as"),
        ("--ttft-ms 5 --prompt 5 --output 5 --rate 1e9", "--rate is 1e+09: give 0 to 10000"),
        (f"{LOAD} --ttft-ms 5 --cost other=1", "--cost other: name a node"),
        (f"{LOAD} --ttft-ms 5 --model llama-70b --node h100-tp4", "one size of a token's KV"),
        (f"{LOAD} --ttft-ms 5 --trace /nowhere", "leave out --prompt, --output"),
        ("--ttft-ms 5 --trace /nowhere", "--trace /nowhere: No such file"),
        ("--ttft-ms 5 --prompt 20000000 --output 5 --rate 1", "no request of the load fits a node"),
        (f"{LOAD} --ttft-ms 1000 --check /proc/x", "--check /proc/x: "),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_give(node, flags, message, capsys):
    try:
        status = main(f"--node {node} {flags}")
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_a_plan_of_known_models_is_made_without_torch():
    code = (
        "import sys; from tandem.plan.command import main; "
        f"main('--model llama-8b --node h100 {LOAD} {GOALS}'.split()); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode == 0


def test_the_commands_of_a_check_are_printed_and_parse(node, tmp_path, capsys):
    assert main(f"--node {node} {LOAD} {GOALS} --check {tmp_path}") == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines() if line.startswith("  tandem ")]
    (_, _, *up), (_, _, *bench) = lines
    commands = parsers()
    assert commands["bench"].parse_args(bench).trace == str(tmp_path / "load.jsonl")
    given = vars(commands["up"].parse_args(up))
    assert (given["prefills"], given["decodes"]) == (5, 1)
    assert given["engine.max_total_tokens"] == 100_000


@pytest.mark.slow
@pytest.mark.cluster
def test_a_plan_holds_in_a_cluster_of_simulated_engines(node, tmp_path, capsys):
    """The check as printed, at a small scale: real processes, the load sent at its times."""
    trace = tmp_path / "trace.jsonl"
    row = {"input_length": 600, "output_length": 30, "hash_ids": [1]}
    trace.write_text("\n".join(json.dumps({"timestamp": 100 * i, **row}) for i in range(60)))
    folder, report = tmp_path / "check", tmp_path / "report.json"
    plan = planned(
        f"--node {node} --trace {trace} --ttft-ms 2000 --itl-ms 500 --check {folder}", capsys
    )
    assert plan["best"]["prefill"]["num_nodes"] == plan["best"]["decode"]["num_nodes"] == 1
    port = str(free_ports(1)[0])
    tandem = [sys.executable, "-P", "-m", "tandem"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    up = [*tandem, *plan["check"]["up"], "--port", port]
    with subprocess.Popen(up, env=env, stdout=subprocess.PIPE, text=True) as cluster:
        try:
            assert any("What it does" in line for line in cluster.stdout), "it did not start"
            url = f"http://127.0.0.1:{port}"
            flags = ["--url", url, "--output-file", str(report)]
            bench = [*tandem, *plan["check"]["bench"], *flags]
            subprocess.run(bench, env=env, check=True, capture_output=True, timeout=120)
        finally:
            cluster.send_signal(signal.SIGTERM)
            cluster.communicate(timeout=60)
    (load,) = json.loads(report.read_text())["loads"]
    assert (load["num_done"], load["num_failed"]) == (60, 0)
