"""Compiled layers: the same tokens, from few compilations; or one clear sentence."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tandem.engine.model import compile_layers
from tandem.engine.runner import ModelRunner
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
@pytest.mark.filterwarnings("ignore")  # of torch's own compiler, about itself
def test_a_compiled_model_generates_the_same_tokens_or_says_what_it_lacks(tiny_model):
    path = tiny_model("llama")
    if HAS_COMPILER:
        assert generate(path, is_compiled=True) == generate(path)
    else:
        with pytest.raises(ConfigInvalid, match="C\\+\\+ compiler"):
            generate(path, is_compiled=True)


@pytest.mark.filterwarnings("ignore")
def test_one_compilation_serves_all_layers_and_batches(tiny_model):
    """Four pieces a layer, for attention is left out; each for one row and for any number."""
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


def test_a_machine_without_a_compiler_is_told_so(monkeypatch):
    monkeypatch.setattr("tandem.engine.model.which", lambda _name: None)
    with pytest.raises(ConfigInvalid, match="leave the flag out"):
        compile_layers(torch.nn.Linear(1, 1), "cpu")
