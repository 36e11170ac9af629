#!/usr/bin/env python3
"""AIPerf, streaming chats with synthetic text."""

from client import Target, expect, main, version

NUM_REQUESTS, OUTPUT_TOKENS = 4, 8


def check(target: Target) -> tuple[str, str]:
    # Otherwise pip would install the CUDA build of torch.
    python = target.python("aiperf", ["install", "torch==2.13.0", "aiperf==0.13"])
    target.run(
        *(python, "-m", "aiperf", "profile", "-m", target.model, "--tokenizer", target.tokenizer),
        *("--url", target.url, "--endpoint-type", "chat", "--streaming", "--ui", "none"),
        *("--concurrency", "2", "--request-count", str(NUM_REQUESTS)),
        *("--synthetic-input-tokens-mean", "32", "--output-tokens-mean", str(OUTPUT_TOKENS)),
        *("--output-artifact-dir", str(target.out)),
        is_offline=False,  # offline, it does not accept a directory as tokenizer
    )
    result = target.json("profile_export_aiperf.json")
    expect("errors", result["error_summary"], [])
    expect("requests", result["request_count"]["avg"], NUM_REQUESTS)
    output = result["total_usage_completion_tokens"]["avg"]
    expect("output tokens", output, NUM_REQUESTS * OUTPUT_TOKENS)
    return version(python, "aiperf"), f"{NUM_REQUESTS} requests, {output:.0f} output tokens"


main("aiperf", check)
