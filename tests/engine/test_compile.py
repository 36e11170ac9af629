"""Compiled layers: the same tokens from few compilations, or a clear error."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tandem.engine.execution.runner import ModelRunner
from tandem.engine.model.loading import compile_layers
from tandem.wire.errors import ConfigInvalid
from tests.engine.test_core import make_engine, prompts
from tests.one_engine import ask, run

HAS_COMPILER = bool(shutil.which("g++") or shutil.which("clang++"))


def generate(path, **settings) -> dict[str, list[int]]:
    engine = make_engine(path, **settings)
    for i, prompt in enumerate(prompts(5)):
        engine.submit(ask(prompt, str(i), max_new_tokens=4))
    return run(engine)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_compiled_model_generates_the_same_tokens_or_is_refused(tiny_model):
    path = tiny_model("llama")
    if HAS_COMPILER:
        assert generate(path, is_compiled=True) == generate(path)
    else:
        with pytest.raises(ConfigInvalid, match="C\\+\\+ compiler"):
            generate(path, is_compiled=True)


@pytest.mark.filterwarnings("ignore")
def test_all_layers_and_batches_share_one_compilation(tiny_model):
    """A layer has four graphs, because attention is not compiled; each is compiled for one row and for many."""
    torch.compiler.reset()
    engine = make_engine(tiny_model("llama"), is_compiled=True, is_eager=True)
    counter = CompileCounterWithBackend("eager")
    assert isinstance(engine._launcher._runner, ModelRunner)
    for layer in engine._launcher._runner._model.module.get_decoder().layers:
        layer.compile(dynamic=True, backend=counter)
    for i, prompt in enumerate(prompts(9)):
        engine.submit(ask(prompt, str(i), max_new_tokens=6))
    run(engine)
    assert counter.frame_count <= 8


def test_missing_compiler_is_refused(monkeypatch):
    monkeypatch.setattr("tandem.engine.model.loading.which", lambda _name: None)
    with pytest.raises(ConfigInvalid, match="omit the flag"):
        compile_layers(torch.nn.Linear(1, 1), "cpu")
