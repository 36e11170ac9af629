"""Every architecture of transformers gives the same results as transformers, or is refused at load."""

import pytest

from tests.architectures import page
from tests.architectures.configs import CONFIG_ONLY, SEEDS, cases, make_model
from tests.architectures.runs import answer_of_transformers, differences, prompts, refusal
from tests.architectures.table import WHY
from tests.one_engine import one_thread
from tests.sample import sampled

# Third-party modelling code and configs may warn.
pytestmark = pytest.mark.filterwarnings("ignore")

# One case per kind of attention and of refusal; `make test-all` runs all cases.
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
    """Parametrize a test with the supported or the refused cases."""
    named = {case.name: case for case in CASES if (case.name not in WHY) == are_served}
    params = sampled(named.values(), *(named[name] for name in SAMPLE & named.keys()))
    return pytest.mark.parametrize("case", params, ids=list(named))


@each(are_served=True)
def test_supported_architecture_generates_the_same_tokens_as_transformers(case, tmp_path):
    assert differences(case, tmp_path) == []


@each(are_served=False)
def test_unsupported_architecture_is_refused_at_load(case, tmp_path):
    assert WHY[case.name] in refusal(case, tmp_path)


def test_ignored_window_changes_the_tokens(tmp_path):
    """With the same weights, a window changes the tokens beyond it and no others."""
    named = {case.name: case for case in CASES}
    with one_thread():
        models = [
            make_model(named[name], tmp_path / name) for name in ("mistral", "mistral, no window")
        ]
        pairs = [[answer_of_transformers(model, each) for model in models] for each in prompts()]
    assert [one.differs(other) for one, other in pairs] == [False, True, True]


def test_tables_list_only_existing_cases():
    assert WHY.keys() | SEEDS.keys() | CONFIG_ONLY.keys() | SAMPLE <= NAMES


def test_models_page_is_up_to_date():
    assert page.PATH.read_text() == page.page(), "run python -m tests.architectures --write"
