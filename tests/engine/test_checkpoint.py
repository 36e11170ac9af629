"""A model is loaded with every weight of its files, or refused in a sentence that names what is wrong."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from tandem.engine import checkpoint
from tandem.engine.checkpoint import read_config
from tandem.engine.config import EngineConfig
from tandem.engine.model import load_model
from tandem.wire.errors import ConfigInvalid
from tests.sample import sampled
from tests.tiny_models import SIZES

METHODS = sorted(AUTO_QUANTIZER_MAPPING)
DOWN = "model.layers.1.mlp.down_proj.weight"


def load_checkpoint(config: EngineConfig):
    return checkpoint.load_checkpoint(config, read_config(config))


def outline(config: EngineConfig):
    return checkpoint.outline(config, read_config(config))


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


def refused_by_both(path) -> str:
    """Return what a node says of a model, which is what a look at the headers says, too."""
    with pytest.raises(ConfigInvalid) as raised:
        outline(settings(path))
    said = refusal(path)
    assert said == raised.value.message
    return said


# ── the tensors ──────────────────────────────────────────────────────────────────────────────────


def test_a_model_that_lacks_a_tensor_is_refused_by_its_name(model_dir):
    change_weights(model_dir, lambda weights: weights.pop(DOWN))
    said = refused_by_both(model_dir)
    assert "lack 1 of the model's tensors" in said
    assert DOWN in said


def test_a_tensor_of_another_shape_is_refused_with_both(model_dir):
    change_weights(model_dir, lambda weights: weights.update({DOWN: weights[DOWN][:, :8].clone()}))
    said = refused_by_both(model_dir)
    assert DOWN in said
    assert "[64, 8]" in said
    assert "[64, 96]" in said


@pytest.mark.parametrize(("num_layers", "says"), [(4, "lack 9"), (2, "more layers")])
def test_files_and_config_have_to_agree_on_the_number_of_layers(model_dir, num_layers, says):
    change_config(model_dir, num_hidden_layers=num_layers)
    said = refused_by_both(model_dir)
    assert says in said
    assert "model.layers." in said


def test_layers_beyond_the_last_are_found_in_files_of_the_bare_decoder_too(model_dir):
    change_config(model_dir, num_hidden_layers=2)
    weights = load_file(model_dir / "model.safetensors")
    bare = {name.removeprefix("model."): each for name, each in weights.items()}
    save_file(bare, model_dir / "model.safetensors", {"format": "pt"})
    assert "more layers" in refused_by_both(model_dir)


def test_an_expert_that_lacks_a_matrix_is_refused_by_the_name_of_its_layer(tmp_path):
    config = MixtralConfig(**SIZES, num_local_experts=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    change_weights(
        tmp_path, lambda weights: weights.pop("model.layers.1.block_sparse_moe.experts.2.w1.weight")
    )
    assert "model.layers.1.mlp.experts.gate_up_proj" in refused_by_both(tmp_path)


def test_tied_weights_are_in_the_files_once_and_nothing_is_missing(tmp_path):
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load_checkpoint(settings(tmp_path))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tensor_that_the_model_has_no_place_for_is_told_to_operators(model_dir):
    change_weights(model_dir, lambda weights: weights.update({"visual.proj": torch.ones(2)}))
    with capture_logs() as logs:
        load_checkpoint(settings(model_dir))
    (line,) = logs
    assert (line["event"], line["such_as"]) == ("checkpoint.unused_tensors", "visual.proj")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused(model_dir, number, dtype):
    change_weights(model_dir, lambda weights: weights[DOWN].view(-1)[-1:].fill_(number))
    assert f"{DOWN} in {model_dir} has elements that are infinite" in refusal(
        model_dir, dtype=dtype
    )


def test_weights_that_are_too_large_for_the_type_asked_for_are_refused(model_dir):
    change_weights(model_dir, lambda weights: weights[DOWN].fill_(1e6))
    load_model(settings(model_dir))
    assert "infinite" in refusal(model_dir, dtype="float16")


@pytest.mark.parametrize("size", sampled([0, 10, 1000, -1], 0, -1))
def test_an_archive_of_weights_that_was_not_copied_whole_is_refused(model_dir, size):
    weights = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    archive = model_dir / "pytorch_model.bin"
    torch.save(weights, archive)
    load_checkpoint(settings(model_dir))
    archive.write_bytes(archive.read_bytes()[:size])
    assert str(model_dir) in refused_by_both(model_dir)


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
        {"model_type": "vit"},
    ],
)
def test_values_of_config_that_cannot_be_are_refused(model_dir, facts):
    change_config(model_dir, **facts)
    said = refused_by_both(model_dir)
    assert said.startswith(f"cannot load the model in {model_dir}: ")


@pytest.mark.parametrize(
    "text", ["[1]", '"llama"', "null", '{"model_type":', "", "\udcff", "[" * 9999]
)
def test_a_config_that_is_no_json_object_is_refused_by_its_name(model_dir, text):
    (model_dir / "config.json").write_text(text, errors="surrogateescape")
    assert str(model_dir / "config.json") in refused_by_both(model_dir)


def test_an_unknown_architecture_is_refused_with_the_version_that_does_not_know_it(model_dir):
    from transformers import __version__

    change_config(model_dir, model_type="llama9")
    said = refused_by_both(model_dir)
    assert f"transformers {__version__}" in said
    assert "model_type llama9" in said


def test_code_of_the_models_own_is_refused_with_the_flag_of_ours_that_allows_it(model_dir):
    change_config(model_dir, model_type="llama9", auto_map={"AutoConfig": "configuration.Llama9"})
    said = refused_by_both(model_dir)
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
def test_a_quantized_model_is_refused_with_what_it_takes(model_dir, quantization, says):
    change_config(model_dir, quantization_config=quantization)
    said = refused_by_both(model_dir)
    assert "--device cpu" in said
    assert says in said


# Those two are loaded, in seconds.
@pytest.mark.parametrize(
    "method", sampled(METHODS, *(each for each in METHODS if each not in {"bitnet", "gemma"}))
)
def test_no_quantization_that_transformers_knows_ends_a_node_with_a_traceback(model_dir, method):
    """Some are loaded: they are plain on a CPU."""
    change_config(model_dir, quantization_config={"quant_method": method})
    try:
        load_checkpoint(settings(model_dir))
    except ConfigInvalid as error:
        assert "\n" not in error.message  # noqa: PT017 - it may also be loaded


def test_an_unknown_quantization_is_refused_by_its_name(model_dir):
    change_config(model_dir, quantization_config={"quant_method": "exl9"})
    said = refused_by_both(model_dir)
    assert "exl9" in said
    assert "does not know" in said


def test_a_quantization_without_a_name_is_refused(model_dir):
    change_config(model_dir, quantization_config={"bits": 4})
    assert "names no quant_method" in refused_by_both(model_dir)


def in_fp8(path, *, is_scaled: bool = True) -> None:
    """Store the matrices as blocks of 8-bit floats, and a scale for each block."""

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


def test_8_bit_floats_become_plain_weights_on_a_cpu_and_operators_are_told(model_dir):
    plain = load_file(model_dir / "model.safetensors")
    in_fp8(model_dir)
    change_config(model_dir, quantization_config=FP8)
    with capture_logs() as logs:
        model = load_checkpoint(settings(model_dir))
    weight = model.model.layers[1].mlp.down_proj.weight
    assert weight.dtype == torch.float32
    assert (weight - plain[DOWN]).abs().max() < plain[DOWN].abs().max() / 16
    assert [(line["event"], line["method"]) for line in logs] == [("checkpoint.dequantized", "fp8")]
    # What they take is what plain ones take, and not what the files have.
    assert outline(settings(model_dir))[1] == sum(each.nbytes for each in plain.values())


def test_8_bit_floats_without_their_scales_are_refused(model_dir):
    in_fp8(model_dir, is_scaled=False)
    change_config(model_dir, quantization_config=FP8)
    said = refused_by_both(model_dir)
    assert "lack the scales" in said


def test_quantized_weights_whose_config_does_not_say_so_are_refused(model_dir):
    in_fp8(model_dir)
    said = refused_by_both(model_dir)
    assert "quantized" in said
    assert "F8_E4M3" in said
