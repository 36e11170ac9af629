"""The choice of a backend, and the errors for unsupported ones."""

import pytest

from tandem.engine.attention.backends import choose_backend, fastest
from tandem.engine.config import EngineOptions
from tandem.engine.shape import ModelShape
from tandem.wire.errors import ConfigInvalid
from tests.engine.toy_runner import toy_shape


def shape(dtype="bfloat16", kv_dtype=None, head_dim=128) -> ModelShape:
    return toy_shape(head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype or dtype)


def config(device="cpu", backend="auto") -> EngineOptions:
    return EngineOptions(device=device, attention_backend=backend)


@pytest.mark.parametrize(("kv_dtype", "name"), [("bfloat16", "cpu"), ("float8_e4m3fn", "torch")])
def test_cpu_backend_is_chosen_for_supported_kv_types(kv_dtype, name):
    assert choose_backend(config(), shape(kv_dtype=kv_dtype)).name == name


@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 128), ("float32", 96)])
def test_triton_backend_is_chosen_on_gpus(dtype, head_dim):
    assert fastest(config("cuda:1"), shape(dtype, head_dim=head_dim)) == "triton"


@pytest.mark.parametrize(
    ("device", "backend", "hint"),
    [
        ("cpu", "triton", "--device cuda"),
        ("cuda", "cpu", "--attention-backend auto"),
    ],
)
def test_unsupported_backend_is_refused_with_an_alternative(device, backend, hint):
    with pytest.raises(ConfigInvalid, match=hint):
        choose_backend(config(device, backend), shape())


def test_missing_triton_is_refused_with_its_install_command(monkeypatch):
    monkeypatch.setattr("tandem.engine.attention.backends.find_spec", lambda _name: None)
    with pytest.raises(ConfigInvalid, match="pip install 'triton"):
        choose_backend(config("cuda", "triton"), shape())


def test_gpu_without_triton_uses_the_reference_backend(monkeypatch):
    monkeypatch.setattr("tandem.engine.attention.backends.find_spec", lambda _name: None)
    assert fastest(config("cuda"), shape()) == "torch"
