#!/usr/bin/env python3
"""GuideLLM, streaming chats with synthetic text."""

from client import Target, expect, main, version

NUM_REQUESTS, OUTPUT_TOKENS = 4, 8


def check(target: Target) -> tuple[str, str]:
    # Otherwise pip would install the CUDA build of torch.
    python = target.python("guidellm", ["install", "torch==2.13.0", "guidellm==0.8.1"])
    target.run(
        *(python, "-m", "guidellm", "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={target.url}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={target.tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}"),
        *("--output", f"kind=json,path={target.out}/result.json"),
    )
    [benchmark] = target.json("result.json")["benchmarks"]
    metrics = benchmark["metrics"]
    wanted = {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}
    expect("requests", metrics["request_totals"], wanted)
    output = metrics["output_token_count"]["successful"]["total_sum"]
    expect("output tokens", output, NUM_REQUESTS * OUTPUT_TOKENS)
    return version(python, "guidellm"), f"{NUM_REQUESTS} requests, {output:.0f} output tokens"


main("guidellm", check)
