"""Every architecture that transformers maps is served as transformers computes it, or refused at load."""

import pytest

from tests.architectures import page
from tests.architectures.configs import CONFIG_ONLY, SEEDS, cases, make_model
from tests.architectures.runs import answer_of_transformers, differences, prompts, refusal
from tests.architectures.table import WHY
from tests.one_engine import one_thread
from tests.sample import sampled

# Modelling code and configurations of others warn as they please.
pytestmark = pytest.mark.filterwarnings("ignore")

# One of each kind of attention, and of refusal, for every run of the tests; `make test-all` takes all.
SAMPLE = {
    "bert",
    "deepseek_v3",
    "gemma3_text",
    "gemma4_text, shared KV",
    "gpt2",
    "gpt_oss",
    "llama4_text, temperature tuning",
    "mixtral",
    "mpt",
    "qwen3_next",
}
CASES = cases()
NAMES = {case.name for case in CASES}


def each(are_served):
    """Have a test take each case that is served, or that is refused."""
    named = {case.name: case for case in CASES if (case.name not in WHY) == are_served}
    params = sampled(named.values(), *(named[name] for name in SAMPLE & named.keys()))
    return pytest.mark.parametrize("case", params, ids=list(named))


@each(are_served=True)
def test_a_model_generates_what_it_does_in_transformers(case, tmp_path):
    assert differences(case, tmp_path) == []


@each(are_served=False)
def test_a_model_that_is_not_served_is_refused_at_load(case, tmp_path):
    assert WHY[case.name] in refusal(case, tmp_path)


def test_a_window_that_is_lost_would_be_seen(tmp_path):
    """The same weights with a window and without: what is within the window is equal, what is not differs."""
    named = {case.name: case for case in CASES}
    with one_thread():
        models = [
            make_model(named[name], tmp_path / name) for name in ("mistral", "mistral, no window")
        ]
        pairs = [[answer_of_transformers(model, each) for model in models] for each in prompts()]
    assert [one.differs(other) for one, other in pairs] == [False, True, True]


def test_tables_name_only_what_is_there():
    assert WHY.keys() | SEEDS.keys() | CONFIG_ONLY.keys() | SAMPLE <= NAMES


def test_the_page_of_models_is_current():
    assert page.PATH.read_text() == page.page(), "run python -m tests.architectures --write"
