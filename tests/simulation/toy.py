"""A model without a model: its KV is the tokens themselves, its answer a digest of all it reads back.

So a page that went elsewhere, was reused too early or never came changes an answer, and so do another
prompt, another index or another seed of a later attempt. It needs no torch, and a step takes microseconds.
"""

import numpy as np
import xxhash

from tandem.engine.config import EngineOptions
from tandem.engine.scheduling.core import Engine
from tandem.engine.scheduling.forward import forward_inputs
from tandem.engine.scheduling.step import Outcome
from tandem.engine.shape import ModelShape
from tandem.kvtransfer.layout import KVLayout
from tandem.wire.generation import TokenLogprobs

VOCAB, EOS, NUM_LAYERS = 997, 1, 2
CONTEXT = 200
# Of a hundred tokens, those that end the answer.
EOS_PERCENT = 2


def digest(tokens, seed: int) -> int:
    """Return what follows from these tokens."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens, np.int64).tobytes(), seed)


def token_after(tokens, seed: int, index: int) -> int:
    """Return what follows these tokens as the token of this index."""
    number = digest(tokens, (seed * 1000003 + index) % 2**64)
    return EOS if number % 100 < EOS_PERCENT else 2 + (number >> 8) % (VOCAB - 2)


def logprob_after(tokens, token: int) -> TokenLogprobs:
    """Return how likely `token` is behind these tokens."""
    return TokenLogprobs(logprob=-(digest(tokens, token) % 4096) / 256)


def answer(prompt, sampling):
    """Return all tokens of an answer, and their log-probabilities."""
    seed = sampling.seed if sampling.temperature > 0 else 0
    tokens, logprob_positions = list(prompt), []
    for index in range(sampling.max_new_tokens):
        token = token_after(tokens, seed, index)
        logprob_positions.append(logprob_after(tokens, token))
        tokens.append(token)
        if token == EOS and not sampling.ignore_eos:
            break
    return tokens[len(prompt) :], logprob_positions


class ToyLauncher:
    """See `tandem.engine.scheduling.step.Launcher`.

    Args:
        memory: Of the pool; it holds ids as four bytes, in each layer's K and V.
    """

    def __init__(self, memory, num_pages: int, page_size: int, *, is_asynchronous: bool) -> None:
        self.is_asynchronous = is_asynchronous
        self._pages = memory.view(np.int32).reshape(num_pages, NUM_LAYERS * 2, page_size)
        self._page_size = page_size
        self._newest = None

    def seed(self, request, drawn: int) -> int:
        return drawn if request.sampling.temperature > 0 else 0

    def launch(self, batch, slots, on_layer_written):
        sampled = batch.sampled()
        inputs = forward_inputs(batch, slots, self._page_size)
        self._write(inputs)
        for layer in range(NUM_LAYERS if on_layer_written is not None else 0):
            on_layer_written(layer)
        rows = np.array([request.slot for request in sampled], np.int64)
        indexes, seeds = slots.next_index[rows].tolist(), slots.seed[rows].tolist()
        known = [self._read(inputs, row) for row in inputs.logit_rows]
        ids = [
            token_after(tokens, seed, index)
            for tokens, seed, index in zip(known, seeds, indexes, strict=False)
        ]
        self._newest = np.array(ids, np.int64)
        logprob_positions = {
            i: logprob_after(known[i], ids[i])
            for i, active in enumerate(sampled)
            if active.request.logprobs is not None
        }
        prompt_ids = [
            chunk.request.token_ids[position]
            for chunk in batch.chunks
            for position in chunk.logprob_positions
        ]
        prompt_told = [
            logprob_after(tokens, token)
            for tokens, token in zip(known[len(sampled) :], prompt_ids, strict=True)
        ]
        outcome = Outcome(
            self._newest, token_logprobs=logprob_positions, prompt_logprobs=prompt_told
        )
        return lambda: outcome

    def _write(self, inputs) -> None:
        ids = inputs.token_ids.copy()
        late = inputs.sources >= 0
        if late.any():
            ids[late] = self._newest[inputs.sources[late]]
        pages = inputs.write_pages(self._page_size)
        self._pages[pages, :, inputs.positions % self._page_size] = ids[:, None]

    def _read(self, inputs, row: int):
        """Return the tokens that a row sees; what no tokens are if K and V, or layers, differ."""
        sequence = int(np.searchsorted(inputs.query_starts, row, side="right")) - 1
        num_keys = int(inputs.positions[row]) + 1
        table = inputs.page_table[sequence, : -(-num_keys // self._page_size)]
        slabs = self._pages[table].transpose(1, 0, 2).reshape(NUM_LAYERS * 2, -1)[:, :num_keys]
        return slabs[0] if (slabs == slabs[0]).all() else slabs.ravel()


def toy_layout(num_pages: int, page_size: int) -> KVLayout:
    """Return the layout of a toy's pool."""
    return KVLayout(
        num_pages=num_pages,
        page_size=page_size,
        num_layers=NUM_LAYERS,
        num_kv_heads=1,
        head_dim=1,
        dtype="float32",
        itemsize=4,
    )


def toy_engine(region, layout: KVLayout, *, is_asynchronous: bool, **settings) -> Engine:
    """Return an engine over a toy in this memory."""
    shape = ModelShape(
        num_layers=NUM_LAYERS,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=VOCAB,
        context_length=CONTEXT,
        eos_token_ids=frozenset({EOS}),
        dtype="float32",
        kv_dtype="float32",
        fingerprint="toy",
    )
    config = EngineOptions(page_size=layout.page_size, **settings)
    launcher = ToyLauncher(
        region.array(), layout.num_pages, layout.page_size, is_asynchronous=is_asynchronous
    )
    return Engine(launcher, shape, config, layout.num_pages)
