"""`tandem plan` over a made-up cluster: what is printed, written and refused."""

import json
import subprocess
import sys

import msgspec
import pytest

from tandem.plan.arguments import parse
from tandem.plan.command import run
from tandem.wire.errors import ConfigInvalid
from tests.tandem.plan.standin import PROFILE, simulate

LOAD = "--prompt 2000 --output 100 --rate 20 --duration 10"


@pytest.fixture
def node(tmp_path):
    file = tmp_path / "measured.json"
    file.write_bytes(msgspec.json.encode(PROFILE))
    return str(file)


def command(text):
    return run(text.split(), simulate)


def test_a_plan_is_told_in_words_and_tables(node, capsys):
    assert command(f"--node {node} {LOAD} --ttft-ms 1000 --itl-ms 20") == 0
    out, err = capsys.readouterr()
    assert "prefill x measured and" in out
    assert "TTFT" in out
    assert "goodput over the ratio" in out
    assert "█" in out
    assert "estimated" not in out
    assert err == ""


def test_estimates_are_marked_wherever_they_are_named(capsys):
    assert command(f"--model llama-8b --node h100 {LOAD} --ttft-ms 1000 --itl-ms 30") == 0
    out = capsys.readouterr().out
    assert out.count("~h100") >= 3
    assert "~ estimated from vendors' figures and measured nowhere" in out


def test_json_says_all_that_was_tried_and_which_is_the_best(node, capsys):
    assert command(f"--node {node} {LOAD} --ttft-ms 1000 --itl-ms 20 --json") == 0
    plan = json.loads(capsys.readouterr().out)
    met = [trial for trial in plan["tried"] if trial["is_met"]]
    assert plan["best"] in met
    assert plan["best"]["cost"] == min(trial["cost"] for trial in met)
    assert plan["load"]["num_prompt"] == 2000 * plan["load"]["num_requests"]
    assert plan["nodes"]["measured"]["is_estimated"] is False


def test_no_fleet_is_an_exit_status_and_a_reason(node, capsys):
    assert command(f"--node {node} {LOAD} --ttft-ms 100 --itl-ms 20") == 1
    out = capsys.readouterr().out
    assert "No fleet of up to 64 nodes was found" in out
    assert "take a faster kind" in out


def test_kinds_are_compared_by_what_they_cost(node, capsys):
    asked = f"--model llama-8b --prefill-node h100 --prefill-node h100-tp2 --decode-node h100 {LOAD} --ttft-ms 1000"
    assert command(f"{asked} --cost h100-tp2=0.5 --json") == 0
    assert json.loads(capsys.readouterr().out)["best"]["prefill"] == "h100-tp2"
    assert command(f"{asked} --cost h100-tp2=50 --json") == 0
    assert json.loads(capsys.readouterr().out)["best"]["prefill"] == "h100"


def test_a_trace_is_planned_for(node, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 100 * i, "input_length": 1500, "output_length": 50, "hash_ids": [1, i, i + 1]}
        for i in range(2, 102)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    assert command(f"--node {node} --trace {trace} --scale 2 --ttft-ms 800 --json") == 0
    load = json.loads(capsys.readouterr().out)["load"]
    assert (load["num_requests"], load["lasts_s"]) == (100, pytest.approx(4.95))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (LOAD, "nothing is asked of the fleet"),
        (f"{LOAD} --ttft-ms 0", "--ttft-ms is 0: give more than 0"),
        (f"{LOAD} --ttft-ms 5 --percentile 101", "--percentile is 101"),
        (f"{LOAD} --ttft-ms 5 --max-nodes 1", "--max-nodes is 1: give at least 2"),
        ("--ttft-ms 5", "the load is not said"),
        ("--ttft-ms 5 --prompt 5 --output 5", "--rate: give requests a second"),
        ("--ttft-ms 5 --prompt five --output 5 --rate 1", "--prompt five: give tokens such as"),
        (f"{LOAD} --ttft-ms 5 --rate 1e9", "10,000,000,000 requests: give at most"),
        (f"{LOAD} --ttft-ms 5 --cost other=1", "--cost other=1: give NODE=X"),
        (f"{LOAD} --ttft-ms 5 --model llama-70b --node h100-tp4", "one model and type of KV"),
        (f"{LOAD} --ttft-ms 5 --trace /nowhere", "leave out --prompt, --output"),
        (
            "--ttft-ms 5 --trace /nowhere --think-time-s 3 --burstiness 2 --num-system-prompts 2",
            "leave out --num-system-prompts, --think-time-s, --burstiness",
        ),
        (f"{LOAD} --ttft-ms 5 --trace-limit 3", "--trace-limit: there is no trace"),
        ("--ttft-ms 5 --trace /nowhere", "--trace /nowhere: No such file"),
        (f"{LOAD} --ttft-ms 5 --plot plan.png", "ends in .svg or .html"),
        ("--ttft-ms 5 --prompt 20000000 --output 5 --rate 1", "no request of the load fits a node"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_give(node, flags, said):
    with pytest.raises(ConfigInvalid) as raised:
        parse(f"--node {node} {flags}".split())
    assert said in raised.value.message


def test_a_plan_without_nodes_says_how_to_name_them(capsys):
    assert command(f"{LOAD} --ttft-ms 5") == 2
    assert "no kind of node for prefill: give --node" in capsys.readouterr().err


def test_planning_starts_without_torch():
    code = "import sys, tandem.plan.command, tandem.plan.planning; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
