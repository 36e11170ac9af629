"""Which checkpoint may replace the one in service, and how an order for it begins and ends."""

import asyncio
import json
import shutil

import msgspec
import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from safetensors.torch import load_file, save_file

from tandem.engine.config import EngineConfig
from tandem.engine.profile import Profile, Simulation
from tandem.frontend.app import create_app
from tandem.frontend.backend import Health
from tandem.frontend.body import validate
from tandem.frontend.options import FrontendOptions
from tandem.node.config import NodeConfig
from tandem.node.life import Event, NotNow, State
from tandem.node.local_backend import LocalBackend
from tandem.node.new_weights import UpdateBody, updated
from tandem.node.supervisor import Supervisor, add_routes
from tandem.wire.errors import InvalidRequest
from tests.patience import PATIENCE_S

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


def test_a_node_takes_the_weights_the_sampling_defaults_and_the_version_of_a_checkpoint(
    config, new_dir
):
    (new_dir / "generation_config.json").write_text('{"temperature": 0.5}')
    edit_config(new_dir, transformers_version="4.1", eos_token_id=3, a_new_key=1)
    new = updated(config, body_of(new_dir))
    assert new.engine == msgspec.structs.replace(config.engine, model_dir=str(new_dir))
    assert (new.default_sampling.temperature, new.weight_version) == (0.5, "step-7")
    assert updated(config, body_of(new_dir, weight_version="7")).weight_version == "7"


def without_head(weights) -> None:
    del weights["lm_head.weight"]


@pytest.mark.parametrize("is_tied", [True, False])
def test_only_a_head_that_is_tied_to_the_embeddings_may_be_left_out(config, new_dir, is_tied):
    old_dir = shutil.copytree(new_dir, new_dir.parent / "step-6")
    engine = msgspec.structs.replace(config.engine, model_dir=str(old_dir))
    config = msgspec.structs.replace(config, engine=engine)
    for path in (old_dir, new_dir):
        edit_config(path, tie_word_embeddings=is_tied)
    edit_weights(new_dir, without_head)
    if is_tied:
        assert updated(config, body_of(new_dir)).engine.model_dir == str(new_dir)
    else:
        with pytest.raises(InvalidRequest, match=r"lack tensors of the model: lm_head\.weight"):
            updated(config, body_of(new_dir))


def reshape(weights) -> None:
    weights["model.norm.weight"] = torch.ones(65)


def rename(weights) -> None:
    weights["model.other.weight"] = weights.pop("model.norm.weight")


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda path: edit_config(path, num_attention_heads=8), "has num_attention_heads 8"),
        (lambda path: edit_config(path, dtype="bfloat16"), "has dtype bfloat16"),
        (lambda path: edit_weights(path, reshape), r"model.norm.weight is \[65\]"),
        (lambda path: edit_weights(path, rename), "lack tensors of the model: model.norm.weight"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "another tokenizer"),
        (lambda path: (path / "adapter_config.json").write_text("{}"), "LoRA adapter"),
        (lambda path: (path / "model.safetensors").unlink(), "has no weights"),
        (shutil.rmtree, "has no config.json"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(config, new_dir, spoil, sentence):
    spoil(new_dir)
    with pytest.raises(InvalidRequest, match=rf"^model_path: .*{sentence}.*with the old weights$"):
        updated(config, body_of(new_dir))


def test_an_explicit_dtype_is_kept_whatever_the_checkpoint_names(config, new_dir):
    edit_config(new_dir, dtype="bfloat16")
    engine = msgspec.structs.replace(config.engine, dtype="float32")
    config = msgspec.structs.replace(config, engine=engine)
    assert updated(config, body_of(new_dir)).engine.dtype == "float32"


def test_a_simulated_engine_has_no_weights(config, new_dir):
    simulation = Simulation(profile=Profile(), kv="none")
    engine = msgspec.structs.replace(config.engine, simulation=simulation)
    with pytest.raises(InvalidRequest, match="simulated"):
        updated(msgspec.structs.replace(config, engine=engine), body_of(new_dir))


@pytest.mark.parametrize(
    "field",
    [{"keep_pause": True}, {"flush_cache": False}, {"is_async": True}, {"load_format": "x"}],
)
def test_a_field_that_is_not_supported_is_refused_by_name(field):
    with pytest.raises(InvalidRequest, match=f"^{next(iter(field))}: must be"):
        body_of("/models/new", **field)


# ── the order ────────────────────────────────────────────────────────────────────────────────────


class FakeEngine:
    """Takes orders. `drains_in_s`: the time that the last drain gives running requests."""

    drains_in_s: float | None = None

    def drain(self, timeout_s: float) -> None:
        self.drains_in_s = timeout_s

    def resume(self) -> None:
        self.drains_in_s = None


class LinkedBackend(LocalBackend):
    """Is linked to its engine at once."""

    def health(self) -> Health:
        return Health(is_serving=self.life.state is State.SERVING, detail="")


class Node:
    """A supervisor that serves; its engine does nothing."""

    def __init__(self, config: NodeConfig) -> None:
        self.backend = LinkedBackend(config, None, "")
        self.life = self.backend.life
        modules = {"decode": "tandem.decode.engine"}
        self.supervisor = Supervisor(config, modules, None, self.backend, None, port=1)
        self.engine = self.supervisor._engine = FakeEngine()
        self.life.apply(Event.LOADED)

    async def begin(self, path, **fields) -> asyncio.Task[NodeConfig]:
        """Order an update, and return once the engine drains."""
        task = asyncio.create_task(self.supervisor.update(body_of(path, **fields)))
        async with asyncio.timeout(PATIENCE_S):
            while self.life.state is State.SERVING and not task.done():  # noqa: ASYNC110 - no event here
                await asyncio.sleep(0.001)
        return task


@pytest.fixture
async def node(config):
    return Node(config)


@pytest.mark.parametrize(
    ("fields", "drains_in_s"),
    [({}, 30.0), ({"timeout_s": 5}, 5.0), ({"abort_all_requests": True, "timeout_s": 5}, 0.0)],
)
async def test_running_requests_have_the_time_of_a_drain_and_then_the_next_engine_loads(
    node, new_dir, fields, drains_in_s
):
    task = await node.begin(new_dir, **fields)
    assert (node.life.state, node.engine.drains_in_s) == (State.DRAINING, drains_in_s)
    node.supervisor._drained()
    assert node.life.state is State.LOADING
    node.life.apply(Event.END)
    node.supervisor._end_update()
    assert (await task).engine.model_dir == str(new_dir)


async def test_a_cancelled_drain_ends_the_update_with_the_old_weights(node, config, new_dir):
    task = await node.begin(new_dir)
    with pytest.raises(NotNow, match="in progress"):
        await node.supervisor.update(body_of(new_dir))
    node.supervisor.resume()
    with pytest.raises(NotNow, match="the drain was cancelled"):
        await task
    node.supervisor.drain(None)
    node.supervisor._drained()
    assert (node.life.state, node.supervisor._config) == (State.DRAINED, config)


async def test_a_drained_node_loads_at_once_and_a_wrong_checkpoint_drains_nothing(node, new_dir):
    with pytest.raises(InvalidRequest):
        await node.supervisor.update(body_of(new_dir / "absent"))
    assert node.life.state is State.SERVING
    node.supervisor.drain(None)
    node.supervisor._drained()
    task = asyncio.create_task(node.supervisor.update(body_of(new_dir)))
    async with asyncio.timeout(PATIENCE_S):
        while node.life.state is State.DRAINED:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.001)
    assert node.life.state is State.LOADING
    task.cancel()


async def test_only_operators_update_the_weights(node):
    app = create_app(node.backend, FrontendOptions(operator_key="operator"))
    add_routes(app, node.supervisor)
    async with TestClient(TestServer(app)) as client:
        async with client.post(ROUTE, json={"model_path": "/new"}) as answer:
            assert answer.status == 401
        headers = {"Authorization": "Bearer operator"}
        async with client.post(ROUTE, json={"model_path": "/new"}, headers=headers) as answer:
            assert answer.status == 400
            assert "model_path" in (await answer.json())["error"]["message"]
