import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.gpu import roofline
from benchmarks.gpu.floors import Device, Line, Work, result, table
from tandem.engine.attention_torch import TorchAttention
from tandem.engine.runner import ModelRunner
from tests.tiny_models import SIZES

DEVICE = Device(bytes_per_s=1000.0, flops_per_s=10_000.0)
WORK = Work(
    layer_params=90, head_params=10, bytes_per_param=2, attention_width=3, kv_bytes_per_token=5
)


def line(phase, ratio, is_ours=True) -> Line:
    return Line("m", phase, "r", 4, 100, floor_s=ratio, took_s=1.0, is_ours=is_ours)


def test_a_decode_step_reads_weights_once_and_each_sequences_keys():
    assert WORK.decode_floor_s(DEVICE, batch=4, context=10) == pytest.approx((200 + 200) / 1000)


def test_a_prompt_multiplies_weights_with_each_token_and_half_the_square_of_scores():
    products = 2 * 90 * 4 + 2 * 10
    attention = 4 * 3 * (1 + 2 + 3 + 4)
    assert WORK.prefill_floor_s(DEVICE, 4) == pytest.approx((products + attention) / 10_000)


def test_the_result_is_the_geometric_mean_of_our_own_lines_of_that_phase():
    lines = [line("decode", 0.5), line("decode", 0.98), line("decode", 0.1, is_ours=False)]
    lines.append(line("prefill", 0.6))
    assert result("decode", lines, 0.8) == "result: decode_roofline 0.700 ratio (goal 0.8) short"
    assert (
        result("prefill", lines, 0.6) == "result: prefill_roofline 0.600 ratio (goal 0.6) reached"
    )
    assert result("decode", [], 0.8).endswith("short")


def test_a_line_of_the_table_has_the_rate_of_tokens_made():
    decode, prefill = table([line("decode", 0.5), line("prefill", 0.5)]).splitlines()[2:]
    assert "| 4 | 0.50 |" in decode
    assert "| 100 | 0.50 |" in prefill


def test_without_a_gpu_it_ends_with_one_sentence_and_status_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert roofline.main([]) == 2
    assert capsys.readouterr().err == (
        "This benchmark needs a CUDA GPU, and torch finds none here.\n"
    )


def test_every_case_that_fits_is_measured(monkeypatch):
    monkeypatch.setattr(roofline, "BATCHES", (1, 3))
    monkeypatch.setattr(roofline, "CONTEXTS", (20,))
    monkeypatch.setattr(roofline, "PROMPTS", (30, 4000))
    rig = roofline.make_rig("tiny", LlamaConfig(**SIZES), "cpu", num_pages=8)
    runner = ModelRunner(rig.paged, rig.pool, TorchAttention())
    lines = list(roofline.runner_lines(rig, DEVICE, runner, "torch", is_ours=True))
    assert [(one.phase, one.batch, one.tokens) for one in lines] == [
        ("decode", 1, 20),
        ("decode", 3, 20),
        ("prefill", 1, 30),
    ]
    assert all(one.took_s > 0 for one in lines)


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-3-8b", (6.98, 0.525)), ("qwen2.5-7b", (6.53, 0.545))]
)
def test_the_shapes_are_those_of_the_models_they_are_named_after(name, billions):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(roofline.CONFIGS[name]())
    head = model.get_output_embeddings().weight.numel()
    layers = sum(weight.numel() for weight in model.parameters()) - 2 * head
    assert (layers / 1e9, head / 1e9) == pytest.approx(billions, rel=0.01)
