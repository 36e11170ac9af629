"""Nodes that are given the name of a model on the hub, as real processes."""

import pytest

from tests.e2e.clients import generate
from tests.e2e.cluster import ask, running_cluster, running_serve
from tests.e2e.test_commands import POOL, refused
from tests.hub_server import serving_hub

FLAGS = ("--dtype", "float32", *POOL)


@pytest.mark.slow
def test_a_cluster_serves_a_model_by_its_name_after_one_download(tiny_model, tmp_path):
    with serving_hub() as hub:
        hub.add_directory("org/tiny", tiny_model("llama"))
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": ""}
        with running_cluster("--model", "org/tiny@main", *FLAGS, env=env) as cluster:
            assert [model["id"] for model in ask(f"{cluster.url}/v1/models")[1]["data"]] == [
                "org/tiny"
            ]
            assert ask(f"{cluster.url}/v1/models/org/tiny")[0] == 200
            told = generate(cluster.url, input_ids=[5, 6, 7], max_new_tokens=8, temperature=0)
            log = "".join(process.output() for process in cluster.processes)
        assert hub.gets["model.safetensors"] == 1
        assert hub.repositories["org/tiny"].commit("main") in log
        said = refused("decode", "--model", "org/none", env=env)
    assert f"nor a public model at {hub.url}" in said
    with running_serve("--model", str(tiny_model("llama")), *FLAGS) as url:
        here = generate(url, input_ids=[5, 6, 7], max_new_tokens=8, temperature=0)
    assert told["output_ids"] == here["output_ids"]
