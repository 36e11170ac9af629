"""A link that flips a bit costs a client nothing: the prompt is computed again, and the tokens are equal."""

import pytest

from tests.e2e.clients import generate
from tests.e2e.cluster import ask, eventually, running_cluster

# Installed for the nodes as anybody's transport is: a distribution with an entry point.
TRANSPORT = '''
import msgspec

from tandem.kvtransfer.transports.base import Admission
from tandem.kvtransfer.transports.tcp import TcpTransport


class FlipsOneBit(TcpTransport):
    """TCP whose first write arrives with another last bit than it was sent with."""

    name = "flips"
    is_well = False

    def connect(self, offer, region):
        connection = super().connect(offer, region)
        healthy, pool = connection.write, region.array()

        def write(room, plan):
            last = int(plan.source_offset[-1] + plan.size_bytes[-1]) - 1
            flip, FlipsOneBit.is_well = not FlipsOneBit.is_well, True
            pool[last] ^= flip
            healthy(room, plan)
            pool[last] ^= flip

        connection.write = write
        return connection

    def listen(self, pool):
        listener = super().listen(pool)
        healthy = listener.admit

        def admit(toward_host):
            found = healthy(toward_host)
            return Admission(found.peer, msgspec.structs.replace(found.offer, name="flips"))

        listener.admit = admit
        return listener
'''
FLAGS = (
    *("--dtype", "float32", "--context-length", "512", "--max-total-tokens", "4096"),
    *("--num-threads", "1", "--log-level", "warning", "--transfer-backend", "flips"),
    *("--attention-backend", "torch"),
    *("--verify-kv", "always"),  # one bit may be in a layer that no sample looks at
)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A place from which the nodes can import the transport."""
    (tmp_path / "flipping_transport.py").write_text(TRANSPORT)
    about = tmp_path / "flipping_transport-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flipping-transport\nVersion: 1\n")
    entry = "[tandem.transports]\nflips = flipping_transport:FlipsOneBit\n"
    (about / "entry_points.txt").write_text(entry)
    return {"PYTHONPATH": str(tmp_path)}


def tokens(url: str, prompt: list[int]) -> list[int]:
    params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    return generate(url, input_ids=prompt, sampling_params=params)["output_ids"]


@pytest.mark.slow
def test_a_bit_that_flips_on_the_way_changes_no_token(tiny_model, installed):
    flags = ("--model", str(tiny_model("llama")), *FLAGS)
    with running_cluster(*flags, env=installed) as cluster:
        prompt = [3 + (i * 7) % 300 for i in range(40)]
        answer = tokens(cluster.url, prompt)
        decode, corrupted = cluster.decode_urls[0], 'tandem_corrupted_total{role="decode"} 1.0'
        assert eventually(lambda: corrupted in ask(f"{decode}/metrics")[1])
        replayed = 'tandem_router_replays_total{error="kv_corrupted"} 1.0'
        assert eventually(lambda: replayed in ask(f"{cluster.url}/metrics")[1])
        assert tokens(cluster.url, [*prompt, *answer[:3]])[:5] == answer[3:]
        assert eventually(lambda: not any(map(in_use, cluster.loads())))


def in_use(load: dict) -> int:
    return load["pages_held"] + load["pages_granted"] + load["pages_quarantined"]
