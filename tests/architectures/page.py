"""docs/models.md, made of the cases and of the table of those that are refused."""

from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.architectures.configs import Case, cases
from tests.architectures.runs import NUM_NEW, PROMPT_LENGTHS
from tests.architectures.table import REFUSED, WHY

PATH = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def page() -> str:
    """Return the page."""
    lengths = ", ".join(map(str, PROMPT_LENGTHS[:-1])) + f" and {PROMPT_LENGTHS[-1]}"
    return f"""<!-- Written by python -m tests.architectures --write; do not edit. -->

# Models

Models come from `transformers`, and Tandem computes their attention itself, over pages. So a model is checked against
transformers at every start, and refused where they differ: a node that starts computes what transformers computes.

The tables below are of transformers {version("transformers")}. What `config.json` calls `model_type` is the architecture. A type that is not in
them, because it is newer or comes with code of its own, is checked at the start like any other.

## Served

A tiny random model of each type generates {NUM_NEW} tokens after prompts of {lengths} tokens, in float32 on a CPU. Tokens and their
log-probabilities are those of transformers' `generate`, whether a prompt is computed alone, beside others, in chunks or from the
prefix cache. Windows, chunks and ranks of these models are smaller than the prompts, so that they matter.

{_table(("model_type", "class", "other configurations tested"), _served())}
## Refused

A node that is given one of these does not start, and says why: "models of type … are not served", and then one of these
sentences.

{_table(("why", "model_type"), _refused())}"""


def _served() -> Iterable[tuple[str, str, str]]:
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if model_type not in WHY:
            others = (case.variant for case in _variants(model_type) if case.name not in WHY)
            name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
            yield f"`{model_type}`", f"`{name}`", ", ".join(others)


def _refused() -> Iterable[tuple[str, str]]:
    order = {case.name: case for case in cases()}
    for why, names in REFUSED.items():
        yield why, ", ".join(_told(order[name]) for name in sorted(names))


def _told(case: Case) -> str:
    return f"`{case.model_type}`" + (f" ({case.variant})" if case.variant else "")


def _variants(model_type: str) -> list[Case]:
    return [case for case in cases() if case.model_type == model_type and case.variant]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
