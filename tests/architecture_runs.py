"""What plain transformers generates with a tiny model, and what our engine does with the same checkpoint."""

import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from engine.attention_backends import choose_backend
from engine.config import EngineConfig
from engine.core import Engine
from engine.launcher import ModelLauncher
from engine.model import load_model
from engine.runner import ModelRunner, make_pool
from tests.architectures import VOCAB_SIZE, tiny_config, tiny_model
from wire.errors import ConfigInvalid
from wire.generation import GenerateRequest, SamplingParams
from wire.ids import RequestId

NUM_NEW = 10
PROMPT_LENGTHS = (5, 37, 70)
NUM_PAGES = 64
CHUNK = 16 + 5  # no multiple of a page


def prompts(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def tokens_of_transformers(model: torch.nn.Module, prompt: Sequence[int]) -> list[int]:
    made = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False, max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, pad_token_id=0, eos_token_id=None, output_logits=True, return_dict_in_generate=True,
    )
    gaps = [float(torch.diff(-step[0].float().topk(2).values)) for step in made.logits]
    return made.sequences[0, len(prompt):].tolist(), min(gaps)


class Ours:
    def __init__(self, path: Path) -> None:
        self.config = EngineConfig(model_dir=str(path), dtype="float32")
        self.model, self.shape = load_model(self.config)

    def engine(self, **settings) -> Engine:
        import msgspec
        config = msgspec.structs.replace(self.config, **settings)
        pool = make_pool(self.shape, NUM_PAGES, config.page_size, "cpu")
        runner = ModelRunner(self.model, pool, choose_backend(config, self.shape))
        launcher = ModelLauncher(runner, self.shape, config.page_size)
        return Engine(launcher, self.shape, config, NUM_PAGES)


def tokens_of_engine(engine: Engine, prompts: Sequence[list[int]]) -> list[list[int]]:
    names = [RequestId(str(i)) for i in range(len(prompts))]
    params = SamplingParams(temperature=0, max_new_tokens=NUM_NEW, ignore_eos=True)
    for name, prompt in zip(names, prompts, strict=True):
        engine.submit(GenerateRequest(request_id=name, prompt_ids=prompt, sampling=params))
    tokens: dict[str, list[int]] = {name: [] for name in names}
    while engine.has_work:
        for token in engine.step().tokens:
            tokens[token.request.request.request_id].append(token.token)
    return [tokens[name] for name in names]


def survey(config: PreTrainedConfig, seed: int, directory: Path) -> str:
    try:
        model = tiny_model(config, seed)
        asked = prompts(seed)
        made = [tokens_of_transformers(model, prompt) for prompt in asked]
        expected, gap = [m[0] for m in made], min(m[1] for m in made)
        model.save_pretrained(directory)
    except Exception as e:
        return f"ORACLE: {type(e).__name__} {str(e)[:150]}".replace("\n", " ")
    note = f"  (gap {gap:.4f}, {len(set(sum(expected, [])))} distinct)"
    try:
        ours = Ours(directory)
    except ConfigInvalid as e:
        return f"refused: {str(e)[:200]}".replace("\n", " ")
    except Exception as e:
        return f"traceback at load: {type(e).__name__} {str(e)[:150]}".replace("\n", " ")
    found = {}
    try:
        one = ours.engine()
        found["alone"] = [tokens_of_engine(one, [prompt])[0] for prompt in asked]
        found["warm"] = tokens_of_engine(one, asked)
        found["batched"] = tokens_of_engine(ours.engine(), asked)
        found["chunked"] = tokens_of_engine(ours.engine(chunked_prefill_size=CHUNK), asked)
    except Exception as e:
        return f"traceback at run: {type(e).__name__} {str(e)[:150]}".replace("\n", " ")
    wrong = [f"{mode}{[n for n, a, b in zip(PROMPT_LENGTHS, tokens, expected) if a != b]}" for mode, tokens in found.items() if tokens != expected]
    return ("WRONG: " + " ".join(wrong) if wrong else "equal") + note


def main() -> None:
    import sys, tempfile, time, warnings
    import transformers
    from tests.architectures import causal_lm_types
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for k in sys.argv[1:] or causal_lm_types():
        t = time.process_time()
        try:
            config = tiny_config(k)
            with torch.device("meta"):
                n = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
            said = f"BIG {n}" if n > 3e6 else None
        except Exception as e:
            said = f"CONFIG: {type(e).__name__} {str(e)[:150]}".replace("\n", " ")
        if said is None:
            with tempfile.TemporaryDirectory() as d:
                said = survey(config, 0, Path(d))
        print(f"{k:28} {time.process_time()-t:5.2f}s {said}", flush=True)

if __name__ == "__main__":
    main()
