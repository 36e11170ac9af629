"""What plain transformers generates with a tiny model, and what our engine does with the same checkpoint."""

import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import transformers

from engine.attention_backends import choose_backend
from engine.config import EngineConfig
from engine.core import Engine
from engine.launcher import ModelLauncher
from engine.model import load_model
from engine.runner import ModelRunner, make_pool
from tests.architectures import VOCAB_SIZE, Case, cases, make_model
from wire.errors import ConfigInvalid
from wire.generation import GenerateRequest, SamplingParams, LogprobsWanted
from wire.ids import RequestId

NUM_NEW = 8
PROMPT_LENGTHS = (5, 37, 70)
NUM_PAGES = 64
CHUNK = 16 + 5  # no multiple of a page
SEED = 0


def prompts(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def of_transformers(model, prompt):
    made = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False, max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, pad_token_id=0, eos_token_id=None, output_logits=True, return_dict_in_generate=True,
    )
    gaps = [float(torch.diff(-step[0].float().topk(2).values)) for step in made.logits]
    tokens = made.sequences[0, len(prompt):].tolist()
    lps = [float(step[0].float().log_softmax(-1)[t]) for step, t in zip(made.logits, tokens)]
    return tokens, lps, min(gaps)


class Ours:
    def __init__(self, path: Path) -> None:
        self.config = EngineConfig(model_dir=str(path), dtype="float32")
        self.model, self.shape = load_model(self.config)

    def engine(self, **settings) -> Engine:
        config = msgspec.structs.replace(self.config, **settings)
        pool = make_pool(self.shape, NUM_PAGES, config.page_size, "cpu")
        runner = ModelRunner(self.model, pool, choose_backend(config, self.shape))
        launcher = ModelLauncher(runner, self.shape, config.page_size)
        return Engine(launcher, self.shape, config, NUM_PAGES)


def of_engine(engine: Engine, prompts: Sequence[list[int]]):
    names = [RequestId(str(i)) for i in range(len(prompts))]
    params = SamplingParams(temperature=0, max_new_tokens=NUM_NEW, ignore_eos=True)
    for name, prompt in zip(names, prompts, strict=True):
        engine.submit(GenerateRequest(request_id=name, prompt_ids=prompt, sampling=params, logprobs=LogprobsWanted()))
    tokens = {name: [] for name in names}
    lps = {name: [] for name in names}
    while engine.has_work:
        for token in engine.step().tokens:
            tokens[token.request.request.request_id].append(token.token)
            lps[token.request.request.request_id].append(token.logprobs.logprob)
    return [(tokens[name], lps[name]) for name in names]


def survey(case: Case, directory: Path) -> str:
    try:
        config = case.config()
        with torch.device("meta"):
            n = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
        if n > 3e6: return f"BIG {n}"
    except Exception as e:
        return f"CONFIG: {type(e).__name__} {str(e)[:150]}".replace("\n", " ")
    try:
        model = make_model(config, SEED, directory)
        asked = prompts(SEED)
        expected = [of_transformers(model, prompt) for prompt in asked]
        gap = min(m[2] for m in expected)
        other = [asked[1][:2] + [9]*10 + asked[1][12:]]
        changed = [of_transformers(model, p) for p in other]
        ctx = abs(changed[0][1][0]-expected[1][1][0])
    except Exception as e:
        return f"ORACLE: {type(e).__name__} {str(e)[:150]}".replace("\n", " ")
    note = f"  (gap {gap:.4f}, {len(set(sum([e[0] for e in expected], [])))} distinct, ctx {ctx:.3f})"
    try:
        ours = Ours(directory)
    except ConfigInvalid as e:
        return f"refused: {str(e)[:200]}".replace("\n", " ")
    except Exception as e:
        return f"traceback at load: {type(e).__name__} {str(e)[:150]}".replace("\n", " ")
    found = {}
    try:
        one = ours.engine()
        found["alone"] = [of_engine(one, [prompt])[0] for prompt in asked]
        found["warm"] = of_engine(one, asked)
        found["batched"] = of_engine(ours.engine(), asked)
        found["chunked"] = of_engine(ours.engine(chunked_prefill_size=CHUNK, attention_backend="torch"), asked)
    except Exception as e:
        return f"traceback at run: {type(e).__name__} {str(e)[:150]}".replace("\n", " ")
    wrong = [f"{mode}{[n for n, a, b in zip(PROMPT_LENGTHS, got, expected) if a[0] != b[0]]}" for mode, got in found.items() if any(a[0]!=b[0] for a,b in zip(got,expected))]
    if wrong: return "WRONG: " + " ".join(wrong) + note
    diff = max(abs(x-y) for got in found.values() for a, b in zip(got, expected) for x, y in zip(a[1], b[1]))
    return ("equal" if diff < 1e-3 else "WRONG LOGPROBS")+ note + f" diff {diff:.1e}"


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    asked = sys.argv[1:]
    for case in cases():
        if asked and case.name not in asked and case.model_type not in asked: continue
        t = time.process_time()
        with tempfile.TemporaryDirectory() as d:
            said = survey(case, Path(d))
        print(f"{case.name:35} {time.process_time()-t:5.2f}s {said}", flush=True)

if __name__ == "__main__":
    main()
