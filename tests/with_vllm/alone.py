"""`python alone.py MODEL REQUESTS ANSWERS [flags of vllm serve]`: vLLM in one process, without Tandem."""

import json
import os
import sys

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

model, requests_path, answers_path, *flags = sys.argv[1:]
parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
args = parser.parse_args(["--model", model, "--max-num-seqs", "256", "--enforce-eager", *flags])
llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
core = llm.llm_engine.engine_core.engine_core
run_step, steps = core.step_fn, []


def step():
    """Run a step, and record it if it generated tokens."""
    outputs, is_executed = run_step()
    found = [each for batch in (outputs or {}).values() for each in batch.outputs]
    if any(each.new_token_ids for each in found):
        steps.append(len(found))
    return outputs, is_executed


core.step_fn = step

adapters = {}


def answer(prompt_ids, sampling):
    adapter, lora = sampling.pop("adapter", None), None
    if adapter is not None:
        lora = adapters.setdefault(adapter, LoRARequest(adapter, len(adapters) + 1, adapter))
    if "structured_outputs" in sampling:
        sampling = sampling | {
            "structured_outputs": StructuredOutputsParams(**sampling["structured_outputs"])
        }
    if "logit_bias" in sampling:
        bias = {int(token): value for token, value in sampling["logit_bias"].items()}
        sampling = sampling | {"logit_bias": bias}
    defaults = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    params = SamplingParams(**defaults | sampling)
    if isinstance(prompt_ids[0], list):
        results = llm.generate(
            [{"prompt_token_ids": each} for each in prompt_ids], params, use_tqdm=False
        )
        return [list(each.outputs[0].token_ids) for each in results]
    [result] = llm.generate(
        [{"prompt_token_ids": prompt_ids}], params, use_tqdm=False, lora_request=lora
    )
    tokens, logprobs = list(result.outputs[0].token_ids), result.outputs[0].logprobs
    if logprobs is None:
        return tokens
    return tokens, [row[token].logprob for token, row in zip(tokens, logprobs, strict=True)]


with open(requests_path) as file:
    answers = [answer(*each) for each in json.load(file)]
with open(answers_path, "w") as file:
    json.dump((answers, len(steps)), file)
