"""Checks of new checkpoints, and the course of an update."""

import asyncio
import json
import shutil

import msgspec
import pytest
import tokenizers
import torch
from aiohttp.test_utils import TestClient, TestServer
from safetensors.torch import load_file, save_file

from tandem.engine.config import EngineConfig
from tandem.engine.profile import Profile, Simulation
from tandem.frontend.app import create_app
from tandem.frontend.backend import Health
from tandem.frontend.chat.body import validate
from tandem.frontend.options import FrontendOptions
from tandem.node.config import NodeConfig
from tandem.node.life.life import LifeEvent, NodeState, StateConflict
from tandem.node.local_backend import LocalBackend
from tandem.node.models.new_weights import UpdateBody, config_with_weights
from tandem.node.process.supervisor import Supervisor, add_routes
from tandem.wire.errors import InvalidRequest
from tests.patience import until_async

ROUTE = "/update_weights_from_disk"


@pytest.fixture
def config(tiny_model):
    return NodeConfig(role="decode", engine=EngineConfig(model_dir=str(tiny_model("llama"))))


@pytest.fixture
def new_dir(tiny_model, tmp_path):
    return shutil.copytree(tiny_model("llama"), tmp_path / "step-7")


def body_of(path, **fields) -> UpdateBody:
    return validate(UpdateBody, {"model_path": str(path), **fields})


def edit_config(path, **facts) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def edit_weights(path, edit) -> None:
    weights = load_file(path / "model.safetensors")
    edit(weights)
    save_file(weights, path / "model.safetensors", {"format": "pt"})


# ── the checkpoint ───────────────────────────────────────────────────────────────────────────────


def test_update_sets_weights_sampling_defaults_and_version(config, new_dir):
    (new_dir / "generation_config.json").write_text('{"temperature": 0.5}')
    edit_config(new_dir, transformers_version="4.1", eos_token_id=3, a_new_key=1)
    new = config_with_weights(config, body_of(new_dir))
    assert new.engine == msgspec.structs.replace(config.engine, model_dir=str(new_dir))
    assert (new.default_sampling.temperature, new.weight_version) == (0.5, "step-7")
    assert config_with_weights(config, body_of(new_dir, weight_version="7")).weight_version == "7"


def without_head(weights) -> None:
    del weights["lm_head.weight"]


@pytest.mark.parametrize("is_tied", [True, False])
def test_only_a_tied_head_may_be_missing(config, new_dir, is_tied):
    old_dir = shutil.copytree(new_dir, new_dir.parent / "step-6")
    engine = msgspec.structs.replace(config.engine, model_dir=str(old_dir))
    config = msgspec.structs.replace(config, engine=engine)
    for path in (old_dir, new_dir):
        edit_config(path, tie_word_embeddings=is_tied)
    edit_weights(new_dir, without_head)
    if is_tied:
        assert config_with_weights(config, body_of(new_dir)).engine.model_dir == str(new_dir)
    else:
        with pytest.raises(InvalidRequest, match=r"missing tensors: lm_head\.weight"):
            config_with_weights(config, body_of(new_dir))


def reshape(weights) -> None:
    weights["model.norm.weight"] = torch.ones(65)


def add_tokenizer(path) -> None:
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(path / "tokenizer.json"))


def rename(weights) -> None:
    weights["model.other.weight"] = weights.pop("model.norm.weight")


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (
            lambda path: edit_config(path, num_attention_heads=8),
            "num_attention_heads in config.json is 8",
        ),
        (lambda path: edit_config(path, dtype="bfloat16"), "dtype in config.json is bfloat16"),
        (lambda path: edit_weights(path, reshape), r"model.norm.weight has shape \[65\]"),
        (lambda path: edit_weights(path, rename), "missing tensors: model.norm.weight"),
        (add_tokenizer, "a different tokenizer"),
        (lambda path: (path / "adapter_config.json").write_text("{}"), "LoRA adapter"),
        (lambda path: (path / "model.safetensors").unlink(), "has no weights"),
        (shutil.rmtree, "has no config.json"),
    ],
)
def test_checkpoint_of_a_different_model_is_rejected(config, new_dir, spoil, sentence):
    spoil(new_dir)
    with pytest.raises(
        InvalidRequest, match=rf"^model_path: .*{sentence}.*the node keeps the old weights$"
    ):
        config_with_weights(config, body_of(new_dir))


def test_explicit_dtype_overrides_the_checkpoint(config, new_dir):
    edit_config(new_dir, dtype="bfloat16")
    engine = msgspec.structs.replace(config.engine, dtype="float32")
    config = msgspec.structs.replace(config, engine=engine)
    assert config_with_weights(config, body_of(new_dir)).engine.dtype == "float32"


def test_simulated_engine_rejects_new_weights(config, new_dir):
    simulation = Simulation(profile=Profile(), kv="none")
    engine = msgspec.structs.replace(config.engine, simulation=simulation)
    with pytest.raises(InvalidRequest, match="simulated"):
        config_with_weights(msgspec.structs.replace(config, engine=engine), body_of(new_dir))


@pytest.mark.parametrize(
    "field",
    [{"keep_pause": True}, {"flush_cache": False}, {"is_async": True}, {"load_format": "x"}],
)
def test_unsupported_field_value_is_rejected_by_name(field):
    with pytest.raises(InvalidRequest, match=f"^{next(iter(field))}: must be"):
        body_of("/models/new", **field)


# ── the update ───────────────────────────────────────────────────────────────────────────────────


class DrainRecorder:
    """An engine process that records orders. `drains_in_s`: timeout of the last drain, in seconds."""

    drains_in_s: float | None = None

    def drain(self, timeout_s: float) -> None:
        self.drains_in_s = timeout_s

    def resume(self) -> None:
        self.drains_in_s = None


class LinkedBackend(LocalBackend):
    """A backend that is linked to its engine immediately."""

    def health(self) -> Health:
        return Health(is_serving=self.life.state is NodeState.SERVING, detail="")


class Node:
    """A serving supervisor whose engine does nothing."""

    def __init__(self, config: NodeConfig) -> None:
        self.backend = LinkedBackend(config, None, "")
        self.life = self.backend.life
        modules = {"decode": "tandem.decode.role"}
        self.supervisor = Supervisor(config, modules, None, self.backend, None, port=1)
        self.engine = self.supervisor._engine = DrainRecorder()
        self.life.apply(LifeEvent.LOADED)

    async def begin(self, path, **fields) -> asyncio.Task[NodeConfig]:
        """Start an update, and return once the engine drains."""
        task = asyncio.create_task(self.supervisor.update(body_of(path, **fields)))
        await until_async(lambda: self.life.state is not NodeState.SERVING or task.done())
        return task


@pytest.fixture
async def node(config):
    return Node(config)


@pytest.mark.parametrize(
    ("fields", "drains_in_s"),
    [({}, 30.0), ({"timeout_s": 5}, 5.0), ({"abort_all_requests": True, "timeout_s": 5}, 0.0)],
)
async def test_update_drains_the_node_before_the_new_engine_loads(
    node, new_dir, fields, drains_in_s
):
    task = await node.begin(new_dir, **fields)
    assert (node.life.state, node.engine.drains_in_s) == (NodeState.DRAINING, drains_in_s)
    node.supervisor._on_drained()
    assert node.life.state is NodeState.LOADING
    node.life.apply(LifeEvent.END)
    node.supervisor._end_update()
    assert (await task).engine.model_dir == str(new_dir)


async def test_cancelled_drain_keeps_the_old_weights(node, config, new_dir):
    task = await node.begin(new_dir)
    with pytest.raises(StateConflict, match="in progress"):
        await node.supervisor.update(body_of(new_dir))
    node.supervisor.resume()
    with pytest.raises(StateConflict, match="the drain was cancelled"):
        await task
    node.supervisor.drain(None)
    node.supervisor._on_drained()
    assert (node.life.state, node.supervisor._config) == (NodeState.DRAINED, config)


async def test_drained_node_loads_immediately_and_bad_checkpoint_drains_nothing(node, new_dir):
    with pytest.raises(InvalidRequest):
        await node.supervisor.update(body_of(new_dir / "absent"))
    assert node.life.state is NodeState.SERVING
    node.supervisor.drain(None)
    node.supervisor._on_drained()
    task = asyncio.create_task(node.supervisor.update(body_of(new_dir)))
    await until_async(lambda: node.life.state is not NodeState.DRAINED)
    assert node.life.state is NodeState.LOADING
    task.cancel()


async def test_weight_update_needs_the_operator_key(node):
    app = create_app(node.backend, FrontendOptions(operator_key="operator"))
    add_routes(app, node.supervisor, node.backend)
    async with TestClient(TestServer(app)) as client:
        async with client.post(ROUTE, json={"model_path": "/new"}) as answer:
            assert answer.status == 401
        headers = {"Authorization": "Bearer operator"}
        async with client.post(ROUTE, json={"model_path": "/new"}, headers=headers) as answer:
            assert answer.status == 400
            assert "model_path" in (await answer.json())["error"]["message"]
