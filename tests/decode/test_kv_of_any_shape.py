"""Models whose layers differ in K and V: a pair generates the tokens of one engine."""

import pytest

from tests.architectures.configs import cases, make_model
from tests.hand_off_rig import Pair, prompt_of
from tests.sample import sampled

# Sinks with windows; latents; heads of two sizes and layers that read another's K and V; chunks with
# positions of their own; V smaller than K, and other numbers of heads by layer.
KINDS = (
    "gpt_oss",
    "deepseek_v3",
    "gemma4_text, shared KV",
    "llama4_text, temperature tuning",
    "mimo_v2_flash",
)
LENGTHS = (5, 37, 70)
LINKS = [("shm", 8), ("shm", 4), ("tcp", 8), ("tcp", 4)]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    """Return a function that creates the directory of a tiny model of a kind, once per kind."""
    made = {}

    def get(kind: str):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("model")
            (case,) = (case for case in cases() if case.name == kind)
            make_model(case, made[kind])
        return made[kind]

    return get


@pytest.mark.parametrize(("transport", "decode_page"), sampled(LINKS, ("shm", 4)))
@pytest.mark.parametrize("kind", KINDS)
def test_pair_generates_the_tokens_of_one_engine(directory_of, kind, transport, decode_page):
    pair = Pair(directory_of(kind), transport, decode_page)
    try:
        for turn in ("first", "from the cache"):
            names = [f"{turn} {length}" for length in LENGTHS]
            requests = [
                pair.start(name, prompt_of(length), max_new_tokens=8)
                for name, length in zip(names, LENGTHS, strict=True)
            ]
            pair.run_until(lambda: all(pair.decode_answers.finishes[name] for name in names))  # noqa: B023
            pair.run_until(pair.all_pages_are_back)
            answers = {name: pair.decode_answers.tokens[name] for name in names}
            assert answers == pair.alone(*requests)
        assert not pair.receiver.statistics().num_corrupted
    finally:
        pair.close()
