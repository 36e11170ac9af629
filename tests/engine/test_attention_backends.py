"""Which backend is chosen, and what is said when the one asked for cannot run."""

import pytest

from tandem.engine.attention_backends import choose_backend, fastest
from tandem.engine.config import EngineConfig
from tandem.engine.shape import ModelShape
from tandem.wire.errors import ConfigInvalid
from tests.engine.toy_runner import toy_shape


def shape(dtype="bfloat16", kv_dtype=None, head_dim=128) -> ModelShape:
    return toy_shape(head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype or dtype)


def config(device="cpu", backend="auto") -> EngineConfig:
    return EngineConfig(model_dir="", device=device, attention_backend=backend)


@pytest.mark.parametrize(("kv_dtype", "name"), [("bfloat16", "cpu"), ("float8_e4m3fn", "torch")])
def test_a_cpu_has_its_own_backend_for_the_types_it_reads(kv_dtype, name):
    assert choose_backend(config(), shape(kv_dtype=kv_dtype)).name == name


def test_a_gpu_has_our_kernels_for_what_flashinfer_does_not_know():
    assert fastest(config("cuda:1"), shape("float32")) == "triton"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "name"),
    [
        ("bfloat16", 128, "flashinfer"),
        ("float32", 128, "triton"),
        ("bfloat16", 96, "triton"),
    ],
)
def test_flashinfer_is_taken_where_it_is_installed_and_knows_the_model(
    fake_flashinfer, dtype, head_dim, name
):
    assert fastest(config("cuda"), shape(dtype, head_dim=head_dim)) == name


@pytest.mark.parametrize(
    ("device", "backend", "hint"),
    [
        ("cpu", "triton", "--device cuda"),
        ("cpu", "flashinfer", "--device cuda"),
        ("cuda", "cpu", "--attention-backend auto"),
    ],
)
def test_a_backend_that_does_not_run_here_is_refused_with_what_to_give(device, backend, hint):
    with pytest.raises(ConfigInvalid, match=hint):
        choose_backend(config(device, backend), shape())


@pytest.mark.parametrize(
    ("missing", "line"),
    [("triton", "pip install 'triton"), ("flashinfer", "pip install 'tandem-serve.flashinfer")],
)
def test_a_missing_library_is_refused_with_the_line_that_installs_it(monkeypatch, missing, line):
    monkeypatch.setattr(
        "tandem.engine.attention_backends.find_spec",
        lambda name: None if name == missing else object(),
    )
    with pytest.raises(ConfigInvalid, match=line):
        choose_backend(config("cuda", missing), shape())


def test_without_triton_a_gpu_has_the_reference(monkeypatch):
    monkeypatch.setattr("tandem.engine.attention_backends.find_spec", lambda _name: None)
    assert fastest(config("cuda"), shape()) == "torch"
