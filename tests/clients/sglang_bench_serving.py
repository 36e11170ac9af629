#!/usr/bin/env python3
"""SGLang's load client, with each of its three backends for SGLang-style servers."""

from urllib.parse import urlsplit

from client import Target, expect, main, version

# The last release that does not require a CUDA build of torch.
SGLANG = "sglang==0.4.10.post2"
NEEDS = ["aiohttp", "ipython", "numpy", "orjson", "pybase64", "pydantic", "requests", "tqdm"]
NUM_REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 6, 32, 8
BACKENDS = ("sglang", "sglang-oai", "sglang-oai-chat")


def check(target: Target) -> tuple[str, str]:
    python = target.python(
        "sglang", ["install", "--no-deps", SGLANG], ["install", *NEEDS, "transformers"]
    )
    parts = urlsplit(target.url)
    for backend in BACKENDS:
        target.run(
            *(python, "-m", "sglang.bench_serving", "--backend", backend),
            *("--host", parts.hostname, "--port", str(parts.port), "--tokenizer", target.tokenizer),
            *("--dataset-name", "random-ids", "--random-range-ratio", "1", "--seed", "1"),
            *("--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)),
            *("--num-prompts", str(NUM_REQUESTS), "--output-file", f"{backend}.jsonl"),
        )
        result = target.json(f"{backend}.jsonl")
        expect(f"{backend}: completed", result["completed"], NUM_REQUESTS)
        expect(f"{backend}: output", result["total_output_tokens"], NUM_REQUESTS * OUTPUT_TOKENS)
        expect(f"{backend}: has a time to first token", result["mean_ttft_ms"] > 0, True)
    return version(python, "sglang"), f"{NUM_REQUESTS} requests by each of {', '.join(BACKENDS)}"


main("sglang.bench_serving", check)
