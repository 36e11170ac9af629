"""Benchmarks start, measure something, and end with the line that reports it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import roofline, sampling
from benchmarks.gpu.all import PARTS, Part, run_all
from benchmarks.rig import machine, result
from tests.patience import PATIENCE_S

LINE = re.compile(r"result: \S+ \S+ \S+ \(goal \S+\) (reached|short)")


@pytest.mark.thorough
def test_a_benchmark_ends_with_its_result():
    command = [sys.executable, "-m", "benchmarks.step_overhead", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("machine: ")
    assert LINE.fullmatch(last)


def test_a_benchmark_starts_again_as_if_the_cpu_had_avx2_alone():
    code = "from benchmarks.rig import parse, parser_of; parse(parser_of('x', 'y'), {})"
    command = [sys.executable, "-c", code, "--avx2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ", avx2; Python 3" in done.stdout


def test_the_machine_line_names_the_instructions_that_matrix_products_use():
    assert ", avx2, avx512_bf16; Python 3" in machine({"fpu", "avx512_bf16", "avx2"})
    assert "avx" not in machine({"fpu"})


@pytest.mark.parametrize(
    ("value", "is_lower_better", "verdict"), [(2, False, "reached"), (2, True, "short")]
)
def test_the_result_line_names_value_goal_and_verdict(value, is_lower_better, verdict):
    line = result("name", value, 1, "ms", is_lower_better=is_lower_better)
    assert line == f"result: name 2 ms (goal 1) {verdict}"
    assert LINE.fullmatch(line)


def test_without_a_gpu_a_gpu_benchmark_ends_with_one_sentence_and_status_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for benchmark in (roofline, sampling):
        assert benchmark.main([]) == 2
        assert "needs a CUDA GPU" in capsys.readouterr().err


def part(name, code, limit_s=PATIENCE_S) -> Part:
    return Part(name, (sys.executable, "-c", code), limit_s)


def test_a_run_of_all_parts_lists_how_each_ended_and_goes_on_where_it_was_cut_off(tmp_path):
    parts = [
        part("good", "print('much'); print('result: x 1 s (goal 2) reached')"),
        part("bad", "raise SystemExit(3)"),
        part("slow", "import time; time.sleep(1000)", limit_s=0.5),
    ]
    (tmp_path / "summary.txt").write_text("goodness: exit 1, 2 s\n")
    assert run_all(parts[:1], tmp_path) == 0
    assert run_all(parts, tmp_path) == 2
    ended = re.sub(r"\d+ s$", "N s", (tmp_path / "summary.txt").read_text(), flags=re.MULTILINE)
    assert ended.splitlines()[1:] == [
        "good: exit 0, N s",
        "  result: x 1 s (goal 2) reached",
        "bad: exit 3, N s",
        "slow: timed out after 0.5 s, N s",
    ]
    assert (tmp_path / "good.log").read_text().startswith("much\n")


def test_all_parts_of_a_gpu_take_at_most_25_minutes_and_name_tests_that_exist():
    assert sum(part.limit_s for part in PARTS) <= 25 * 60
    named = [Path(word) for part in PARTS for word in part.command if word.startswith("tests/")]
    assert sorted(named) == sorted(Path("tests/gpu").glob("test_*.py"))
