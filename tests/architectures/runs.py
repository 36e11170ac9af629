"""What plain transformers generates with a tiny model, and what our engine does with the same checkpoint."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.model.loading import load_model
from tandem.engine.scheduling.core import Engine
from tandem.wire.errors import ConfigInvalid
from tandem.wire.generation import LogprobOptions, SamplingParams
from tests.architectures.configs import CONFIG_ONLY, VOCAB_SIZE, Case, make_model
from tests.one_engine import make_engine, one_thread, run_together

# The shortest is shorter than a page, a window and a chunk; the others are longer.
PROMPT_LENGTHS = (5, 37, 70)
NUM_NEW = 8
NUM_PAGES = 64
CHUNKED_PREFILL = 21  # no multiple of a page

# Between the two largest logits: less, and the order in which a library sums could decide.
LEAST_GAP = 1e-3
# Of log-probabilities: what is right differs by 1e-4 at most, what is wrong by hundredths at least.
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Answer:
    """What was generated for one prompt, and the log-probability of each token."""

    tokens: list[int]
    logprobs: list[float]

    def differs(self, other: "Answer") -> bool:
        """Tell whether two computations of the same prompt cannot both be right."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return self.tokens != other.tokens or any(
            not math.isclose(own, far, rel_tol=0, abs_tol=TOLERANCE) for own, far in pairs
        )


class Tied(Exception):
    """Two tokens are so close that the comparison would be luck."""


def prompts() -> list[list[int]]:
    """Return the prompts that every model is given."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randint(3, VOCAB_SIZE, (n,), generator=generator) for n in PROMPT_LENGTHS)
    return [each.tolist() for each in drawn]


def answer_of_transformers(model: torch.nn.Module, prompt: Sequence[int]) -> Answer:
    """Return what `generate` of transformers makes of a prompt alone.

    Raises:
        Tied: The model needs another seed.
    """
    made = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NUM_NEW,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(made.logits).float()  # (NUM_NEW, VOCAB_SIZE)
    first, second = logits.topk(2).values.unbind(dim=1)
    if (gap := float((first - second).min())) < LEAST_GAP:
        raise Tied(f"two logits differ by {gap:.1e} only: give the case another seed")
    tokens = made.sequences[0, len(prompt) :]
    chosen = logits.log_softmax(dim=1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    return Answer(tokens.tolist(), chosen.tolist())


class Served:
    """A checkpoint that our engine took.

    Raises:
        ConfigInvalid: It did not.
    """

    def __init__(self, directory: Path, **settings) -> None:
        self.config = EngineConfig(model_dir=str(directory), dtype="float32", **settings)
        self.model, self.shape = load_model(self.config)

    def ways(self) -> Iterator[tuple[str, list[Answer]]]:
        """Yield the answers to all prompts, computed in every way that must not matter."""
        engine, asked = self._engine(), prompts()
        yield "alone", [_answers(engine, [prompt])[0] for prompt in asked]
        yield "from the prefix cache", _answers(engine, asked)
        yield "together", _answers(self._engine(), asked)
        in_chunks = self._engine(chunked_prefill_size=CHUNKED_PREFILL, attention_backend="torch")
        yield "in chunks", _answers(in_chunks, asked)

    def _engine(self, **settings) -> Engine:
        config = msgspec.structs.replace(self.config, **settings)
        return make_engine(config, self.model, self.shape, NUM_PAGES)


def _answers(engine: Engine, asked: Sequence[list[int]]) -> list[Answer]:
    params = SamplingParams(temperature=0, max_new_tokens=NUM_NEW, ignore_eos=True)
    made = run_together(engine, asked, [params] * len(asked), LogprobOptions())
    return [
        Answer([token.token for token in answer], [token.logprobs.logprob for token in answer])
        for answer in made
    ]


def differences(case: Case, directory: Path) -> list[str]:
    """Return for which prompts, and in which ways of computing, we are not what transformers is.

    Raises:
        ConfigInvalid: Our engine refuses the model.
        Tied: The model needs another seed.
    """
    with one_thread():
        model = make_model(case, directory)
        served = Served(directory)
        right = [answer_of_transformers(model, prompt) for prompt in prompts()]
        wrong = {
            way: [
                str(len(prompt))
                for prompt, own, far in zip(prompts(), answers, right, strict=True)
                if own.differs(far)
            ]
            for way, answers in served.ways()
        }
    return [
        f"{way}, of {' and '.join(lengths)} tokens" for way, lengths in wrong.items() if lengths
    ]


def refusal(case: Case, directory: Path) -> str:
    """Return why our engine refuses the model; empty: it does not."""
    is_whole = case.name not in CONFIG_ONLY
    with one_thread():
        if is_whole:
            make_model(case, directory)
        else:
            case.config().save_pretrained(directory)
        try:
            Served(directory, load_format="auto" if is_whole else "dummy")
        except ConfigInvalid as error:
            return error.message.replace(str(directory), "DIRECTORY")
    return ""
