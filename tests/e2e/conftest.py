"""Processes that several modules ask: whoever needs no flags of its own, and kills nothing, takes these."""

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
