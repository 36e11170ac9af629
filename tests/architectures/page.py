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

Tandem loads models with `transformers` and computes their attention itself, over pages. At each start a node sends two short
sequences through its engine and through plain transformers, and compares all logits. If they differ, the node does not start. A small model is checked
with its own weights, a large one as a copy with few layers and random weights. `--skip-model-check` skips the check.

The lists hold for transformers {version("transformers")}. They name the `model_type` in `config.json`, and in brackets further tested configurations. A
`model_type` in neither list is checked at the start like all others.

## By name

`--model org/name` downloads a model from the [Hugging Face Hub](https://huggingface.co/models). `org/name@REVISION` names a branch, tag or commit;
`org/name:Q4_K_M` or `org/name:FILE.gguf` names a GGUF file, as in llama.cpp and vLLM. A path that exists wins; `org/name/FILE.gguf` is always a path.
Clients know the model as `org/name`.

A node fetches config, tokenizer, chat template and safetensors, never pickles. Nodes on one machine share the download, and after an interruption the next
start keeps complete files. Each node logs the commit. Nodes with different weights do not pair: give `@COMMIT` when a model may change between starts.

| variable | meaning |
| --- | --- |
| `HF_TOKEN` | token for gated and private models |
| `HF_HOME` | directory of the cache and its `token` file |
| `HF_ENDPOINT` | URL of a mirror |
| `HF_HUB_OFFLINE=1` | use only the cache |

## Served

Tests compare tokens and log-probabilities of each architecture with transformers' `generate`: a tiny random model, {NUM_NEW} tokens after prompts of
{lengths} tokens, in float32 on a CPU. Each prompt runs alone, in a batch, in chunks and from the prefix cache.

{", ".join(_served())}.

A model with LongRoPE is served up to its `original_max_position_embeddings`. Beyond that, an answer would depend on the other requests of its batch.

## Refused

A node with one of these models does not start. The error gives the reason as in this table.

{_table(("reason", "model_type"), _refused())}"""


def _served() -> Iterable[str]:
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if model_type not in WHY:
            others = [case.variant for case in _variants(model_type) if case.name not in WHY]
            yield f"`{model_type}`" + (f" ({', '.join(others)})" if others else "")


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
