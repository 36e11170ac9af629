"""Sampling parameters that a request leaves out: the model's own, and behind them the API's."""

import dataclasses

import msgspec
import pytest

from tandem.wire.generation import SamplingDefaults
from tests.frontend.fakes import length, say
from tests.frontend.helpers import ROUTES, post

OF_MODEL = SamplingDefaults(
    temperature=0.25, top_p=0.5, top_k=7, min_p=0.125, repetition_penalty=1.5
)
NAMES = OF_MODEL.__struct_fields__


@pytest.fixture
def model(backend):
    """A model that comes with defaults of its own."""
    backend.script = say(length(5))
    backend.served = dataclasses.replace(backend.served, default_sampling=OF_MODEL)


async def sampling_of(client, backend, path: str, body: dict) -> SamplingDefaults:
    """Return what the engine is asked for."""
    backend.requests.clear()
    status, answer = await post(client, path, ROUTES[path] | body)
    assert status == 200, answer
    [request] = backend.requests
    return SamplingDefaults(**{name: getattr(request.sampling, name) for name in NAMES})


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("path", ROUTES)
async def test_what_a_request_leaves_out_is_as_the_model_has_it(client, backend, path):
    assert await sampling_of(client, backend, path, {}) == OF_MODEL
    assert await sampling_of(client, backend, path, dict.fromkeys(NAMES)) == OF_MODEL


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0), ("top_p", 1), ("top_k", -1), ("min_p", 0), ("repetition_penalty", 1)],
)
async def test_what_a_request_sets_wins(client, backend, path, name, value):
    asked = await sampling_of(client, backend, path, {name: value})
    assert asked == msgspec.structs.replace(OF_MODEL, **{name: value})


@pytest.mark.usefixtures("model")
async def test_what_stands_in_sampling_params_wins(client, backend):
    for part, expected in (({"top_k": 3}, 3), ({"top_k": None}, 7), ({}, 5)):
        body = {"top_k": 5, "sampling_params": part}
        assert (await sampling_of(client, backend, "/generate", body)).top_k == expected


@pytest.mark.parametrize("path", ROUTES)
async def test_a_model_without_defaults_leaves_those_of_the_api(client, backend, path):
    backend.script = say(length(5))
    assert await sampling_of(client, backend, path, {}) == SamplingDefaults()
    plain = SamplingDefaults(
        temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0
    )
    assert SamplingDefaults() == plain


@pytest.mark.usefixtures("model")
async def test_the_defaults_in_force_are_shown(client):
    async with client.get("/model_info") as response:
        info = await response.json()
    assert info["default_sampling_params"] == msgspec.to_builtins(OF_MODEL)
