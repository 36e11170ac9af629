"""Benchmarks start, measure something, and end with the line that reports it."""

import re
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu import roofline
from benchmarks.rig import machine, result

LINE = re.compile(r"result: \S+ \S+ \S+ \(goal \S+\) (reached|short)")


@pytest.mark.slow
def test_a_benchmark_ends_with_its_result():
    command = [sys.executable, "-m", "benchmarks.step_overhead", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("machine: ")
    assert LINE.fullmatch(last)


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
    assert roofline.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
