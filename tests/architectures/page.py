"""docs/models.md, made of the cases and of the table of those that are refused."""

from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tandem.node.models.gguf_config import ARCHITECTURES
from tests.architectures.configs import Case, cases
from tests.architectures.runs import NUM_NEW, PROMPT_LENGTHS
from tests.architectures.table import REFUSED, WHY

PATH = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def page() -> str:
    """Return the page."""
    lengths = ", ".join(map(str, PROMPT_LENGTHS[:-1])) + f" and {PROMPT_LENGTHS[-1]}"
    return f"""<!-- Written by python -m tests.architectures --write; do not edit. -->

# Models

Tandem loads models with `transformers` and computes their attention over pages. At each start a node runs two short sequences through its engine and
through transformers, and compares all logits. If they differ, the node does not start. It checks a small model with its own weights, and a large one as a
copy with few layers and random weights. `--skip-model-check` skips the check.

The lists hold for transformers {version("transformers")}. They name the `model_type` in `config.json`, and in brackets further tested configurations. The
start-up check also decides about a `model_type` in neither list.

## By name

`--model org/name` downloads a model from the [Hugging Face Hub](https://huggingface.co/models); clients know it as `org/name`.

| `--model` | selects |
| --- | --- |
| `org/name@REVISION` | a branch, tag or commit |
| `org/name:Q4_K_M`, `org/name:FILE.gguf` | a GGUF file |
| an existing path, `org/name/FILE.gguf` | always a path |

A node fetches config, tokenizer, chat template and safetensors, never pickles. Nodes on one machine share the download, and a restart keeps complete
files. Each node logs the commit. Nodes with different weights do not pair: use `@COMMIT` if the model may change between starts.

| variable | meaning |
| --- | --- |
| `HF_TOKEN` | token for gated and private models |
| `HF_HOME` | directory of the cache and its `token` file |
| `HF_ENDPOINT` | URL of a mirror |
| `HF_HUB_OFFLINE=1` | use only the cache |

## Tokenizers

A node lets `AutoTokenizer` of its transformers load `tokenizer.json` and the files next to it, and sends the result to routers. So ids, special tokens and
decoded text are those of transformers. The keys of these files count as in transformers: for example, `add_bos_token` and `add_eos_token` have no effect.

| tokenizer | text |
| --- | --- |
| no `tokenizer.json` | not served: requests need ids |
| no fast version | the node does not start |
| own Python code | only with `--trust-remote-code` |

Chat templates: `--chat-template`, or else `chat_template.jinja` and `additional_chat_templates/*.jinja`, or else those in `tokenizer_config.json`, or else
`chat_template.json`. Requests with tools use the template `tool_use`, if there is one. On a router, `--tokenizer DIR` needs
`pip install 'tandem-serve[parsers]'`.

## GGUF

The first start converts a GGUF file to safetensors: in bfloat16, or in the type that `--dtype` sets. Later starts use the result. A node reads everything in the file, or rejects it by the name of a key or tensor.

| part | read |
| --- | --- |
| `general.architecture` | {", ".join(f"`{name}`" for name in ARCHITECTURES)} |
| RoPE | base, width, linear, YaRN, LongRoPE (`rope_factors_long`, `rope_factors_short`), Llama 3 (`rope_freqs`) |
| attention | head sizes, sliding window, soft caps |
| tokenizer | `tokenizer.ggml.pre`, tokens added at both ends, all chat templates |
| end of an answer | `eos_token_id`, `eot_token_id`, `eom_token_id` |
| `general.sampling` | temperature, top-k, top-p, min-p, repetition penalty |

Mixtral models (`llama.expert_count`) and values that differ between layers are rejected. So are the parts of a split file: join them with
`llama-gguf-split --merge`.

## Keys of config.json

A node rejects a key that changes logits, such as `sliding_window` or `attn_logit_softcapping`, if no code of the `model_type` reads it. It logs other unread keys
(`checkpoint.unread_config_keys`). It also rejects biases, and norms of queries and keys, that the model has no place for.

An answer ends at each `eos_token_id` of `generation_config.json`, or else of `config.json`, and at the tokenizer's `eos_token`.

## Served

Tests compare tokens and log-probabilities of each architecture with transformers' `generate`. They use a tiny random model in float32 on a CPU,
{NUM_NEW} tokens after prompts of {lengths} tokens. Each prompt runs alone, in a batch, in chunks and from the prefix cache.

{", ".join(_served())}.

Tandem serves a model with LongRoPE up to its `original_max_position_embeddings`. Beyond that, an answer would depend on the other requests of its batch.

## Refused

A node with one of these models does not start; the error gives the reason.

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
