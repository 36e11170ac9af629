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

Tandem loads models with `transformers` and computes their attention itself, over pages. At every start a node makes
a small copy of the model, with few layers and random float32 weights. It sends two short sequences through its engine and through plain
transformers, and compares all logits. A node whose model differs does not start. `--skip-model-check` leaves the check out.

The tables below hold for transformers {version("transformers")}. The architecture of a model is the `model_type` in its `config.json`. One that is
not in the tables, because it is newer or comes with its own code, is checked at the start like all others.

## Served

For each architecture, a tiny random model generates {NUM_NEW} tokens after prompts of {lengths} tokens, in float32 on a CPU. The tokens
and their log-probabilities must be those of transformers' `generate`, with each prompt alone, with all prompts in one batch, in
chunks, and from the prefix cache. Sliding windows and chunks of attention in these models are shorter than the prompts.

{_table(("model_type", "class", "other configurations tested"), _served())}
A model with LongRoPE is served up to its `original_max_position_embeddings`: beyond that, its answers would depend on the requests
that are computed beside it.

## Refused

A node with a model of one of these architectures does not start. The error gives the reason as in this table.

{_table(("reason", "model_type"), _refused())}"""


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
