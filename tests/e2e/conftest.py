"""Processes that several modules ask: whoever needs no flags of its own, and kills nothing, takes these."""

import json
import shutil

import pytest

from tests.e2e.cluster import running_cluster, running_serve

PAGE, CHUNK, CONTEXT = 16, 64, 512
FLAGS = (
    *("--dtype", "float32", "--page-size", str(PAGE), "--chunked-prefill-size", str(CHUNK)),
    *("--context-length", str(CONTEXT), "--max-total-tokens", "16384", "--num-threads", "1"),
    *("--log-level", "warning"),
)


@pytest.fixture(scope="package")
def serve(embedded_model):
    """The URL of `tandem serve` with the embedded model."""
    with running_serve("--model", str(embedded_model), *FLAGS) as url:
        yield url


@pytest.fixture(scope="package")
def cluster(embedded_model):
    """A prefill, a decode and a router with the embedded model, through shared memory.

    What decode computes by itself, which this router asks for never, takes many steps.
    """
    flags = ("--model", str(embedded_model), "--transfer-backend", "shm", *FLAGS)
    with running_cluster(*flags, decode_flags=("--local-prefill-tokens", "24")) as made:
        yield made


@pytest.fixture(scope="package")
def described_model(embedded_model, tmp_path_factory):
    """A directory that tells all about the embedded model and has none of its weights."""
    directory = tmp_path_factory.mktemp("described")
    for file in (*embedded_model.glob("*.json*"), *embedded_model.glob("*.jinja")):
        shutil.copy(file, directory)
    assert not list(directory.glob("*.safetensors"))
    return directory


@pytest.fixture
def profile(tmp_path):
    """Return a function that writes how long a simulated engine takes; it returns the flag."""

    def write(per_token_ms: float, step_ms: float) -> tuple[str, str]:
        file = tmp_path / "profile.json"
        times = {"prefill": {"per_token_ms": per_token_ms}, "decode": {"base_ms": step_ms}}
        file.write_text(json.dumps(times))
        return "--sim-profile", str(file)

    return write
