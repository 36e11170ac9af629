"""Sampling time of a decode step, compared with the lower bound of the step's forward.

    python -m benchmarks.gpu.sampling [--rows 256] [--vocab-size 128256]

The lower bound is the time to read the bfloat16 weights of Llama-3-8B and 2,000 tokens of KV per row once, at the
rate of a copy measured in the same run. The result line is for the slowest set of sampling parameters.
"""

import sys
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.roofline import measure_device, seconds
from benchmarks.rig import parse, parser_of, result
from tandem.engine.sampling.sampler import sample
from tandem.engine.scheduling.forward import Slots
from tandem.engine.scheduling.request import ActiveRequest
from tandem.wire.generation import GenerateRequest, RequestId, SamplingParams
from tandem.wire.prefixes import token_array

# Bytes of Llama-3-8B in bfloat16, without its embeddings, which are only looked up.
WEIGHT_BYTES, KV_BYTES_OF_TOKEN, CONTEXT = 15.0e9, 131_072, 2_000
GOAL = 0.05

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "min-p": SamplingParams(temperature=0.8, min_p=0.05),
    "top-p": SamplingParams(temperature=0.8, top_p=0.95),
    "top-k and top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
}


def slots_of(num_rows: int, sampling: SamplingParams) -> Slots:
    """Return the parameters of a batch of equal requests."""
    slots = Slots(num_rows, 1)
    for seed in range(num_rows):
        request = GenerateRequest(
            request_id=RequestId(str(seed)), prompt_ids=[1], sampling=sampling
        )
        tokens = token_array([1])
        slots.take(ActiveRequest(request, arrival=0, max_tokens=2, seed=seed, token_ids=tokens))
    return slots


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = parser_of("gpu.sampling", "Measure how long sampling takes on a GPU.")
    parser.add_argument("--rows", type=int, default=256, metavar="N", help="requests per batch")
    parser.add_argument(
        "--vocab-size", type=int, default=128_256, metavar="N", help="vocabulary size of the model"
    )
    args = parse(parser, {"rows": 8, "vocab_size": 1_000}, argv)
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU, but torch finds none.", file=sys.stderr)
        return 2
    step_bytes = WEIGHT_BYTES + args.rows * CONTEXT * KV_BYTES_OF_TOKEN
    step_s = step_bytes / measure_device().bytes_per_s
    print(f"{torch.cuda.get_device_name()}; a step takes at least {1000 * step_s:.2f} ms")
    logits = 3 * torch.randn(args.rows, args.vocab_size, dtype=torch.bfloat16, device="cuda")
    rows, slowest_s = np.arange(args.rows), 0.0
    for name, sampling in KINDS.items():
        took_s = seconds(partial(sample, logits, slots_of(args.rows, sampling), rows), "cuda")
        slowest_s = max(slowest_s, took_s)
        print(f"{name:16}{1000 * took_s:8.3f} ms{took_s / step_s:8.3f} of a step")
    print(result("sampling_share_of_step", slowest_s / step_s, GOAL, is_lower_better=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
