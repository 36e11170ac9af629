"""KV beyond the device with real processes: the same tokens, whatever was evicted, restarted, shared or spoiled."""

import contextlib
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.cli.up import free_ports
from tandem.kvtransfer.region import SHM_DIR
from tandem.wire.generation import SamplingParams
from tandem.wire.prefixes import PageSpace, page_keys, shard_key
from tests.e2e.clients import generate, load_of
from tests.e2e.cluster import START_TIMEOUT_S, ask, load_now, running, running_cluster, wait_healthy
from tests.one_engine import tokens_of_one_engine
from tests.patience import eventually
from tests.processes import Process
from tests.tiny_models import VOCAB_SIZE

PAGE, NUM_NEW = 8, 40
POOL_TOKENS = 1024
FLAGS = (
    *("--page-size", str(PAGE), "--max-total-tokens", str(POOL_TOKENS), "--num-threads", "1"),
    *("--kv-tier-min-tokens", "32", "--kv-tier-timeout-ms", "20000", "--log-level", "warning"),
)


def prompt_of(seed: int, num_tokens: int = 300) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]


def asked(url: str, prompt: list[int], num_new: int = NUM_NEW, **body) -> tuple[list[int], dict]:
    answer = generate(
        url, input_ids=prompt, max_new_tokens=num_new, temperature=0, ignore_eos=True, **body
    )
    assert "error" not in answer, answer
    return answer["output_ids"], answer["meta_info"]


def tiers_of(url: str) -> dict[str, dict]:
    return {tier["name"]: tier for tier in load_of(url)["tiers"]}


def hit_tokens(urls: list[str]) -> int:
    """Return how many tokens all these nodes together had from the disk."""
    tiers = [tier for url in urls for tier in load_now(url)["tiers"]]
    return sum(tier["hit_tokens"] for tier in tiers if tier["name"] == "disk")


def is_put(url: str, directory: Path, token_ids: list[int], num_ranks: int = 1) -> bool:
    """Whether all pages of a prompt and its answer come to be on the disk, whichever node puts which."""
    fingerprint = ask(f"{url}/server_info")[1]["model"]["fingerprint"]
    space = PageSpace(fingerprint, "float32", PAGE, f"0/{num_ranks}")
    # Nobody has computed the KV of the last token.
    digests = [key.digest for key in page_keys(space, token_ids[:-1])]
    names = {digest.hex() for digest in digests}
    for rank in range(1, num_ranks):
        names |= {shard_key(digest, f"{rank}/{num_ranks}").hex() for digest in digests}
    return eventually(lambda: names <= {file.name for file in directory.rglob("*")})


def has_put(url: str, num_tokens: int, tier: str = "disk") -> bool:
    """Whether a tier has been given this many tokens, and has them."""
    return eventually(lambda: tiers_of(url)[tier]["num_pages"] * PAGE >= num_tokens)


@contextlib.contextmanager
def cluster_on(model: Path, directory: Path) -> Iterator:
    disk = ("--kv-tier", f"disk:{directory}:1GiB")
    with running_cluster(
        *("--model", str(model), "--dtype", "float32", *FLAGS),
        prefills=2,
        prefill_flags=("--kv-tier", "host:64MiB", *disk),
        decode_flags=disk,
        router_flags=("--policy", "round_robin"),
    ) as made:
        yield made


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def cluster(tiny_model, directory):
    with cluster_on(tiny_model("llama"), directory) as made:
        yield made


def alone(path: Path, prompts: list[list[int]], num_new: int = NUM_NEW) -> list[list[int]]:
    sampling = SamplingParams(temperature=0, max_new_tokens=num_new, ignore_eos=True)
    answers = []
    for prompt in prompts:  # one by one, so that no batch has an influence
        answers += tokens_of_one_engine(
            path, [prompt], [sampling], page_size=PAGE, chunked_prefill_size=512
        )
    return answers


def test_tokens_stay_the_same_when_their_prompts_come_back_from_tiers(cluster, tiny_model):
    # Each 38 pages, of which a pool has 128: by the second round all were evicted everywhere.
    prompts = [prompt_of(seed) for seed in range(8)]
    expected = alone(tiny_model("llama"), prompts)
    for _ in range(2):
        for i, prompt in enumerate(prompts):
            tokens, meta = asked(cluster.url, prompt)
            assert tokens == expected[i]
    assert meta["cached_tokens"] == 296
    details = meta["cached_tokens_details"]
    assert details["device"] + details.get("host", 0) + details.get("disk", 0) == 296
    assert details["device"] < 296


def test_what_one_prefill_computed_another_finds(cluster, tiny_model, directory):
    prompt = prompt_of(50)
    (expected,) = alone(tiny_model("llama"), [prompt])
    first, meta = asked(cluster.url, prompt)
    assert is_put(cluster.prefill_urls[0], directory, prompt + first)
    assert meta["cached_tokens"] == 0
    hits = hit_tokens(cluster.prefill_urls)
    second, meta = asked(cluster.url, prompt)  # the other's turn
    assert meta["cached_tokens_details"] == {"device": 0, "disk": 296}
    assert first == second == expected
    assert hit_tokens(cluster.prefill_urls) == hits + 296


def test_what_decode_generated_is_found_by_the_next_turn(cluster, tiny_model, directory):
    prompt = prompt_of(60)
    answer, _ = asked(cluster.url, prompt)
    assert is_put(cluster.decode_urls[0], directory, prompt + answer)
    longer = [*prompt, *answer, *prompt_of(61, 20)]
    (expected,) = alone(tiny_model("llama"), [longer])
    tokens, meta = asked(cluster.url, longer)
    assert tokens == expected
    # Not the last token, whose KV nobody has computed.
    assert meta["cached_tokens"] == (300 + NUM_NEW - 1) // PAGE * PAGE


def fill_pool(url: str) -> None:
    """Have prefill's pool filled by other prompts, so that nothing asked for before is left in it."""
    for seed in range(900, 904):  # 38 pages each, of 128
        asked(url, prompt_of(seed), num_new=2)


@pytest.mark.slow
def test_nodes_of_two_ranks_find_what_both_have_also_after_a_restart(tiny_model, tmp_path):
    model, prompt = tiny_model("llama"), prompt_of(1)
    disk = ("--kv-tier", f"disk:{tmp_path}/kv:1GiB")
    flags = ("--model", str(model), "--dtype", "float32", *FLAGS, "--tp", "2")
    with running_cluster(
        *flags, prefill_flags=("--kv-tier", "host:64MiB", *disk), decode_flags=disk
    ) as cluster:
        (prefill,) = cluster.prefill_urls
        (expected,) = alone(model, [prompt])
        tokens, meta = asked(cluster.url, prompt)
        assert (tokens, meta["cached_tokens"]) == (expected, 0)
        assert is_put(prefill, tmp_path / "kv", prompt + tokens, num_ranks=2)
        assert has_put(prefill, 2 * 296, tier="host")  # each rank its part
        fill_pool(cluster.url)
        tokens, meta = asked(cluster.url, prompt)
        assert meta["cached_tokens_details"] == {"device": 0, "host": 296}
        assert tokens == expected
        # What the ranks of decode generated, those of prefill find.
        fill_pool(cluster.url)
        longer = [*prompt, *tokens, *prompt_of(2, 20)]
        (expected_longer,) = alone(model, [longer])
        tokens, meta = asked(cluster.url, longer)
        assert meta["cached_tokens_details"] == {"device": 0, "host": 296, "disk": 40}
        assert tokens == expected_longer
        told = tiers_of(prefill)
        assert told["host"]["limit_bytes"] == 64 << 20
        assert told["disk"]["limit_bytes"] == 1 << 30

        restarted = cluster.processes[0]
        restarted.stop()
        cluster.processes[0] = Process(*restarted.argv)
        wait_healthy(prefill, cluster.processes[0])
        tokens, meta = asked(cluster.url, prompt)
        assert meta["cached_tokens_details"] == {"device": 0, "disk": 296}
        assert tokens == expected


def pool_sizes() -> set[int]:
    """Return the lengths of the pools' files that are there."""
    sizes = set()
    for pool in SHM_DIR.glob("tandem-*.pool"):
        with contextlib.suppress(FileNotFoundError):
            sizes.add(pool.stat().st_size)
    return sizes


@pytest.mark.slow
def test_a_rank_whose_tier_cannot_be_had_ends_the_start_and_leaves_no_memory(tiny_model, tmp_path):
    (tmp_path / "tandem-kv-1").write_text("not a directory")
    node = Process(
        *("decode", "--port", str(free_ports(1)[0]), "--model", str(tiny_model("llama")), *FLAGS),
        *("--tp", "2", "--kv-tier", f"disk:{tmp_path}:1GiB", "--log-level", "info"),
        # As nobody else has: other nodes' pools are in that folder, too.
        *("--max-total-tokens", "1112"),
    )
    assert node.wait(START_TIMEOUT_S) == 2
    said = node.output()
    node.stop()
    assert "tandem-kv-1: File exists" in said
    (pool_bytes,) = set(re.findall(r'"pool_bytes": (\d+)', said))
    assert int(pool_bytes) not in pool_sizes()


def simulated(model: Path, *flags: str):
    """A node whose forwards take no time and whose pages have bytes."""
    return running("serve", "--engine", "simulated", "--model", str(model), *FLAGS, *flags)


def test_a_node_finds_after_a_restart_what_it_put_and_nothing_that_was_spoiled(
    tiny_model, tmp_path
):
    model, prompt = tiny_model("llama"), prompt_of(1)
    disk = ("--kv-tier", f"disk:{tmp_path}/kv:1GiB")
    with simulated(model, *disk) as (url, _):
        expected, _ = asked(url, prompt)
        assert is_put(url, tmp_path / "kv", prompt + expected)
    with simulated(model, *disk) as (url, _):
        tokens, meta = asked(url, prompt)
        assert meta["cached_tokens_details"] == {"device": 0, "disk": 296}
        assert tokens == expected
    for file in (tmp_path / "kv").rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            data = bytearray(file.read_bytes())
            data[-500] ^= 1
            file.write_bytes(data)
    with simulated(model, *disk) as (url, _):
        tokens, meta = asked(url, prompt)
        assert meta["cached_tokens"] == 0
        assert tokens == expected
        assert eventually(lambda: tiers_of(url)["disk"]["num_corrupted"] > 0)
        assert has_put(url, 296)  # what was spoiled is put anew


def test_metrics_and_the_line_of_a_batch_say_what_tiers_gave(tiny_model, tmp_path):
    flags = ("--kv-tier", f"disk:{tmp_path}/kv:1GiB", "--log-level", "info")
    with simulated(tiny_model("llama"), *flags) as (url, process):
        answer, _ = asked(url, prompt_of(1))
        assert is_put(url, tmp_path / "kv", prompt_of(1) + answer)
        for seed in range(3, 9):
            asked(url, prompt_of(seed))
        _, meta = asked(url, prompt_of(1))
        assert meta["cached_tokens_details"]["disk"] > 0
        wanted = 'tandem_kv_tier_hit_tokens_total{role="serve",tier="disk"} 296.0'
        assert eventually(lambda: wanted in ask(f"{url}/metrics")[1])
        assert eventually(lambda: ", #disk-token: 296" in process.output())
