"""A runner without a model: its KV is the tokens themselves, and its answer a digest of the tokens that it reads.

A token depends on all earlier tokens, read back through the page table. A page that was reused too early, a wrong
position or a stale token changes all following tokens.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from tandem.engine.config import EngineOptions
from tandem.engine.execution.launcher import ModelLauncher
from tandem.engine.scheduling.core import Engine
from tandem.engine.scheduling.forward import ForwardInputs, OnLayerWritten
from tandem.engine.shape import ModelShape

VOCAB = 50
EOS = 1


def toy_token(tokens: Sequence[int]) -> int:
    """Return the token that follows these tokens."""
    digest = hashlib.blake2b(np.asarray(tokens, np.int64).tobytes(), digest_size=4).digest()
    return 2 + int.from_bytes(digest) % (VOCAB - 2)


def toy_answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return an answer of `num_tokens` tokens to a prompt."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(toy_token(tokens))
    return tokens[len(prompt) :]


class ToyRunner:
    """Stores tokens in pages and reads them back.

    Attributes:
        num_rows: Tokens computed so far.
        largest: Number of rows of the largest forward.
    """

    device = torch.device("cpu")

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.pages = np.zeros((num_pages, page_size), np.int64)
        self.num_rows = self.largest = 0

    def forward(
        self,
        inputs: ForwardInputs,
        sampled: torch.Tensor | None = None,
        on_layer_written: OnLayerWritten | None = None,
    ) -> torch.Tensor:
        """See `Runner.forward`."""
        page_size = self.pages.shape[1]
        ids = inputs.token_ids.copy()
        late = inputs.sources >= 0
        if late.any():
            assert sampled is not None
            ids[late] = sampled.numpy()[inputs.sources[late]]
        self.pages[inputs.write_pages(page_size), inputs.positions % page_size] = ids
        if on_layer_written is not None:
            on_layer_written(0)
        self.num_rows += inputs.num_rows
        self.largest = max(self.largest, inputs.num_rows)
        logits = torch.zeros(len(inputs.logit_rows), VOCAB)
        for i, row in enumerate(inputs.logit_rows):
            sequence = int(np.searchsorted(inputs.query_starts, row, side="right")) - 1
            known = self.pages[inputs.page_table[sequence]].ravel()
            logits[i] = self.logits_after(known[: inputs.positions[row] + 1])
        return logits

    def logits_after(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits of the token that follows these tokens. Shape (VOCAB,)."""
        logits = torch.zeros(VOCAB)
        logits[toy_token(tokens)] = 9.0
        return logits


class ShardedToyRunner(ToyRunner):
    """A toy runner of two ranks, each of which stores a digit of every token, so that answers need both pages.

    Attributes:
        shards: The pages of each rank.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self.shards = [np.zeros_like(self.pages) for _ in range(2)]

    def forward(
        self,
        inputs: ForwardInputs,
        sampled: torch.Tensor | None = None,
        on_layer_written: OnLayerWritten | None = None,
    ) -> torch.Tensor:
        """See `Runner.forward`."""
        self.pages = self.shards[0] * 8 + self.shards[1]
        logits = super().forward(inputs, sampled, on_layer_written)
        # Written in place, because tiers keep the arrays.
        self.shards[0][:], self.shards[1][:] = divmod(self.pages, 8)
        return logits


def toy_shape(**changes) -> ModelShape:
    """Return the shape of a minimal model, with these changes."""
    return ModelShape(
        **{
            "num_layers": 1,
            "num_kv_heads": 1,
            "head_dim": 1,
            "vocab_size": VOCAB,
            "context_length": 1 << 20,
            "eos_token_ids": frozenset({EOS}),
            "dtype": "float32",
            "kv_dtype": "float32",
            "fingerprint": "toy",
            **changes,
        }
    )


def toy_engine(
    num_pages: int,
    page_size: int = 4,
    context_length: int = 1 << 20,
    make_runner: type[ToyRunner] = ToyRunner,
    grammars=None,
    **settings,
):
    """Return an engine with a toy runner, and the runner."""
    shape = toy_shape(context_length=context_length)
    config = EngineOptions(page_size=page_size, **{"chunked_prefill_size": 16, **settings})
    runner = make_runner(num_pages, page_size)
    launcher = ModelLauncher(runner, shape, page_size)
    return Engine(launcher, shape, config, num_pages, grammars=grammars), runner
