"""What a model's generation_config.json says of sampling, through real processes."""

import shutil

import pytest

from tests.e2e.clients import generate
from tests.e2e.cluster import ask, running_cluster, running_router, running_serve
from tests.e2e.test_commands import POOL, refused

GREEDY = {"temperature": 0}
NUM_NEW = 24


@pytest.fixture(scope="module")
def greedy_model(tiny_model, tmp_path_factory):
    """A model that answers greedily unless a request says otherwise."""
    directory = tmp_path_factory.mktemp("greedy") / "model"
    shutil.copytree(tiny_model("llama"), directory)
    write_defaults(directory, '{"temperature": 0.0, "eos_token_id": 2}')
    return directory


def write_defaults(directory, text: str) -> None:
    (directory / "generation_config.json").write_text(text)


def answers(url: str, **sampling) -> list[list[int]]:
    """The ids that two routes answer."""
    body = {"ignore_eos": True, **sampling}
    native = generate(url, input_ids=[5, 6, 7], max_new_tokens=NUM_NEW, **body)
    body |= {"prompt": [5, 6, 7], "max_tokens": NUM_NEW, "logprobs": 0}
    openai = ask(f"{url}/v1/completions", body)[1]
    return [native["output_ids"], openai["choices"][0]["logprobs"]["tokens"]]


def default_temperature(url: str) -> float:
    return ask(f"{url}/model_info")[1]["default_sampling_params"]["temperature"]


@pytest.mark.slow
def test_the_sampling_defaults_of_a_model_hold_in_a_cluster_and_on_a_node(greedy_model):
    flags = ("--model", str(greedy_model), "--dtype", "float32", "--log-level", "warning", *POOL)
    with running_cluster(*flags) as cluster:
        expected = answers(cluster.url, **GREEDY)
        assert answers(cluster.url) == expected
        assert answers(cluster.url, temperature=1.0, seed=1) != expected
        assert default_temperature(cluster.url) == default_temperature(cluster.decode_urls[0]) == 0
        info = ask(f"{cluster.prefill_urls[0]}/server_info")[1]
        assert info["model"]["default_sampling"]["temperature"] == 0
        with running_router(cluster, "--generation-config", "none") as plain:
            assert default_temperature(plain) == 1
    with running_serve(*flags) as node:
        assert answers(node) == expected
    with running_serve(*flags, "--generation-config", "none") as node:
        assert default_temperature(node) == 1
        assert answers(node, seed=1) == answers(node, seed=1, temperature=1.0) != expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "flags", "sentence"),
    [
        ('{"temperature": "hot"}', (), "Expected `float`, got `str` - at `$.temperature`"),
        # The ids that end an answer are read all the same.
        ("{", ("--generation-config", "none"), "is not valid JSON"),
    ],
)
def test_a_generation_config_that_cannot_be_used_is_refused_at_the_start(
    greedy_model, tmp_path, text, flags, sentence
):
    directory = tmp_path / "model"
    shutil.copytree(greedy_model, directory)
    write_defaults(directory, text)
    assert sentence in refused("serve", "--model", str(directory), "--port", "0", *flags, *POOL)
