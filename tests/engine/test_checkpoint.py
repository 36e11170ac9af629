"""A model is loaded with all weights of its files, or refused with one sentence about the fault."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, core_model_loading
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from tandem.engine.config import EngineConfig
from tandem.engine.model import checkpoint
from tandem.engine.model.checkpoint import read_config
from tandem.engine.model.loading import load_model
from tandem.wire.errors import ConfigInvalid
from tests.sample import sampled
from tests.tiny_models import SIZES

METHODS = sorted(AUTO_QUANTIZER_MAPPING)
DOWN = "model.layers.1.mlp.down_proj.weight"


def load_checkpoint(config: EngineConfig):
    return checkpoint.load_checkpoint(config, read_config(config))


@pytest.fixture
def model_dir(tiny_model, tmp_path):
    return shutil.copytree(tiny_model("llama"), tmp_path / "model")


def change_config(path, **facts):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def change_weights(path, change):
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def settings(path, **others) -> EngineConfig:
    return EngineConfig(model_dir=str(path), **others)


def refusal(path, **others) -> str:
    with pytest.raises(ConfigInvalid) as raised:
        load_model(settings(path, **others))
    assert "\n" not in raised.value.message
    return raised.value.message


# ── the tensors ──────────────────────────────────────────────────────────────────────────────────


def test_missing_tensor_is_refused_by_name(model_dir):
    change_weights(model_dir, lambda weights: weights.pop(DOWN))
    said = refusal(model_dir)
    assert "lack 1 of the model's tensors" in said
    assert DOWN in said


def test_wrong_tensor_shape_is_refused_with_both_shapes(model_dir):
    change_weights(model_dir, lambda weights: weights.update({DOWN: weights[DOWN][:, :8].clone()}))
    said = refusal(model_dir)
    assert DOWN in said
    assert "[64, 8]" in said
    assert "[64, 96]" in said


@pytest.mark.parametrize(("num_layers", "says"), [(4, "lack 9"), (2, "more layers")])
def test_number_of_layers_must_match_the_config(model_dir, num_layers, says):
    change_config(model_dir, num_hidden_layers=num_layers)
    said = refusal(model_dir)
    assert says in said
    assert "model.layers." in said


def test_surplus_layers_are_refused_in_files_of_the_bare_decoder(model_dir):
    change_config(model_dir, num_hidden_layers=2)
    weights = load_file(model_dir / "model.safetensors")
    bare = {name.removeprefix("model."): each for name, each in weights.items()}
    save_file(bare, model_dir / "model.safetensors", {"format": "pt"})
    assert "more layers" in refusal(model_dir)


def test_missing_expert_matrix_is_refused_by_layer_name(tmp_path):
    config = MixtralConfig(**SIZES, num_local_experts=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    change_weights(
        tmp_path, lambda weights: weights.pop("model.layers.1.block_sparse_moe.experts.2.w1.weight")
    )
    assert "model.layers.1.mlp.experts.gate_up_proj" in refusal(tmp_path)


def test_tied_weights_stored_once_are_complete(tmp_path):
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load_checkpoint(settings(tmp_path))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mlp.down_proj.bias", "biases"),
        ("self_attn.q_norm.weight", "norms of queries or keys"),
        ("self_attn.k_norm.bias", "norms of queries or keys"),
        ("self_attn.key_layernorm.weight", "norms of queries or keys"),
        ("self_attn.q_layernorm.norms.0.weight", "norms of queries or keys"),
    ],
)
def test_tensor_that_would_change_the_logits_is_refused(model_dir, name, kind, bare):
    prefix = "" if bare else "model."
    weights = load_file(model_dir / "model.safetensors")
    own = {prefix + each.removeprefix("model."): tensor for each, tensor in weights.items()}
    surplus = f"{prefix}layers.1.{name}"
    own[surplus] = torch.ones(64)
    save_file(own, model_dir / "model.safetensors", {"format": "pt"})
    assert f"{kind} that the model does not have ({surplus})" in refusal(model_dir)


def test_norms_outside_the_model_or_without_their_projection_are_unused(model_dir):
    layer = "model.layers.1.self_attn"
    parts = ["visual.0.q_norm.weight", f"{layer}.key_norm.weight", f"{layer}.key_proj.weight"]
    change_weights(
        model_dir, lambda weights: weights.update({part: torch.ones(16) for part in parts})
    )
    with capture_logs() as logs:
        load_checkpoint(settings(model_dir))
    assert [line["num"] for line in logs] == [3]


def test_unused_tensor_is_logged(model_dir):
    change_weights(model_dir, lambda weights: weights.update({"visual.proj": torch.ones(2)}))
    with capture_logs() as logs:
        load_checkpoint(settings(model_dir))
    (line,) = logs
    assert (line["event"], line["such_as"]) == ("checkpoint.unused_tensors", "visual.proj")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_infinite_and_nan_weights_are_refused(model_dir, number, dtype):
    change_weights(model_dir, lambda weights: weights[DOWN].view(-1)[-1:].fill_(number))
    assert f"{DOWN} in {model_dir} has infinite or NaN elements" in refusal(model_dir, dtype=dtype)


def test_weights_that_overflow_the_requested_dtype_are_refused(model_dir):
    change_weights(model_dir, lambda weights: weights[DOWN].fill_(1e6))
    load_model(settings(model_dir))
    assert "infinite" in refusal(model_dir, dtype="float16")


@pytest.mark.parametrize("size", sampled([0, 10, 1000, -1], 0, -1))
def test_truncated_weight_archive_is_refused(model_dir, size):
    weights = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    archive = model_dir / "pytorch_model.bin"
    torch.save(weights, archive)
    load_checkpoint(settings(model_dir))
    archive.write_bytes(archive.read_bytes()[:size])
    assert str(model_dir) in refusal(model_dir)


def test_tensors_are_read_onto_the_device_one_at_a_time(model_dir, monkeypatch):
    # The meta device stands for a GPU, whose tensors are not in host memory.
    read, devices = core_model_loading._materialize_copy, []

    def counted(tensor, device=None, dtype=None):
        devices.append(str(device))
        return read(tensor, device, dtype)

    monkeypatch.setattr(core_model_loading, "_materialize_copy", counted)
    monkeypatch.setattr(checkpoint, "_check_numbers", lambda *_: None)  # there are none
    model = load_checkpoint(settings(model_dir, device="meta"))
    assert {each.device.type for each in model.parameters()} == {"meta"}
    assert len(devices) == 2 * len(load_file(model_dir / "model.safetensors"))  # headers, weights
    assert {*devices} == {"meta"}


# ── config.json ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "facts",
    [
        {"num_hidden_layers": "3"},
        {"hidden_size": None},
        {"num_attention_heads": 0},
        {"dtype": "float31"},
        {"hidden_act": "no_such"},
        {"rope_parameters": {"rope_type": "no_such"}},
        {"quantization_config": ["fp8"]},
        {"model_type": 7},
    ],
)
def test_invalid_config_values_are_refused(model_dir, facts):
    change_config(model_dir, **facts)
    said = refusal(model_dir)
    assert said.startswith(f"cannot load the model in {model_dir}: ")


@pytest.mark.parametrize(
    "text", ["[1]", '"llama"', "null", '{"model_type":', "", "\udcff", "[" * 9999]
)
def test_config_that_is_not_a_json_object_is_refused_by_name(model_dir, text):
    (model_dir / "config.json").write_text(text, errors="surrogateescape")
    assert str(model_dir / "config.json") in refusal(model_dir)


def test_unknown_architecture_is_refused_with_the_transformers_version(model_dir):
    from transformers import __version__

    change_config(model_dir, model_type="llama9")
    said = refusal(model_dir)
    assert f"transformers {__version__}" in said
    assert "model_type llama9" in said


def test_remote_code_is_refused_with_the_flag_that_allows_it(model_dir):
    change_config(model_dir, model_type="llama9", auto_map={"AutoConfig": "configuration.Llama9"})
    said = refusal(model_dir)
    assert "--trust-remote-code" in said
    assert "trust_remote_code=True" not in said


# ── quantized weights ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, "optimum"),
        ({"quant_method": "awq", "bits": 4}, "gptqmodel"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "hqq"}, "HQQ"),
        ({"quant_method": "torchao"}, "torchao"),
        ({"quant_method": "fbgemm_fp8"}, "requires a GPU"),
    ],
)
def test_unsupported_quantization_is_refused_with_its_requirement(model_dir, quantization, says):
    change_config(model_dir, quantization_config=quantization)
    said = refusal(model_dir)
    assert "--device cpu" in said
    assert says in said


# BitNet and Gemma are loaded, which takes seconds.
@pytest.mark.parametrize(
    "method", sampled(METHODS, *(each for each in METHODS if each not in {"bitnet", "gemma"}))
)
def test_no_quantization_method_raises_another_exception(model_dir, method):
    """Some methods load, because their weights are plain on a CPU."""
    change_config(model_dir, quantization_config={"quant_method": method})
    try:
        load_checkpoint(settings(model_dir))
    except ConfigInvalid as error:
        assert "\n" not in error.message  # noqa: PT017 - loading may also succeed


def test_unknown_quantization_is_refused_by_name(model_dir):
    change_config(model_dir, quantization_config={"quant_method": "exl9"})
    said = refusal(model_dir)
    assert "exl9" in said
    assert "does not support" in said


def test_quantization_without_a_method_is_refused(model_dir):
    change_config(model_dir, quantization_config={"bits": 4})
    assert "has no quant_method" in refusal(model_dir)


def in_fp8(path, *, is_scaled: bool = True) -> None:
    """Store the matrices as blocks of 8-bit floats with a scale per block."""

    def pack(weights):
        for name in [name for name in weights if "_proj" in name]:
            rows, columns = weights[name].shape
            blocks = weights[name].view(rows // 32, 32, columns // 32, 32)
            scales = blocks.abs().amax((1, 3)) / 448
            packed = (blocks / scales[:, None, :, None]).view(rows, columns)
            weights[name] = packed.to(torch.float8_e4m3fn)
            if is_scaled:
                weights[f"{name}_scale_inv"] = scales

    change_weights(path, pack)


FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}


def test_8_bit_floats_are_dequantized_on_a_cpu_with_a_warning(model_dir):
    plain = load_file(model_dir / "model.safetensors")
    in_fp8(model_dir)
    change_config(model_dir, quantization_config=FP8)
    with capture_logs() as logs:
        model = load_checkpoint(settings(model_dir))
    weight = model.model.layers[1].mlp.down_proj.weight
    assert weight.dtype == torch.float32
    assert (weight - plain[DOWN]).abs().max() < plain[DOWN].abs().max() / 16
    assert [(line["event"], line["method"]) for line in logs] == [("checkpoint.dequantized", "fp8")]


def test_8_bit_floats_without_scales_are_refused(model_dir):
    in_fp8(model_dir, is_scaled=False)
    change_config(model_dir, quantization_config=FP8)
    said = refusal(model_dir)
    assert "lack the scales" in said


def test_quantized_weights_without_quantization_config_are_refused(model_dir):
    in_fp8(model_dir)
    said = refusal(model_dir)
    assert "quantized" in said
    assert "F8_E4M3" in said
