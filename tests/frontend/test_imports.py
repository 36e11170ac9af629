"""What a request needs is imported before the first one comes: an import would hold up the loop for seconds."""

import subprocess
import sys

import pytest

SERVE = """
import asyncio, sys
from pathlib import Path

from tandem.frontend.app import create_app
from tandem.frontend.options import FrontendOptions
from tandem.frontend.replies.parser import reply_formats
from tandem.frontend.text.tokenizer import Tokenizer
from tests.frontend.conftest import serve_app
from tests.frontend.fakes import FakeBackend
from tests.frontend.helpers import post

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
REQUESTS = [
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2, "stop_regex": "b+"}}),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "logprobs": 1}),
    ("/v1/completions", {"prompt": "a " * 4000, "max_tokens": 2}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"tools": TOOLS}),
    ("/v1/chat/completions", CHAT | {"tools": TOOLS, "tool_choice": "required"}),
    ("/v1/chat/completions", CHAT | {"response_format": SCHEMA}),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 2}}),
    ("/tokenize", {"prompt": "a"}),
    ("/detokenize", {"tokens": [5]}),
]

async def main():
    backend = FakeBackend(Tokenizer.load(Path(sys.argv[1])))
    options = FrontendOptions(reply_formats=reply_formats("hermes", "qwen3"))
    async with serve_app(create_app(backend, options)) as client:
        assert (await post(client, "/abort_request", {"rid": "a"}))[0] == 200
        before = set(sys.modules)
        for path, body in REQUESTS:
            status, answer = await post(client, path, body)
            assert status == 200, (path, body, answer)
        print(*sorted(set(sys.modules) - before))

asyncio.run(main())
"""


def test_no_request_imports_a_module(tokenizer_dir):
    ran = subprocess.run(
        [sys.executable, "-c", SERVE, str(tokenizer_dir)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import tandem.frontend.app, tandem.frontend.http.server", "torch transformers numpy"),
        ("from tandem.frontend.replies.parser import reply_formats", "transformers"),
        (
            "from tandem.frontend.replies.parser import reply_formats\n"
            "reply_formats('hermes', 'think').reply('', [{}])().push('a')",
            "torch",
        ),
    ],
)
def test_large_libraries_are_imported_on_demand(code, absent):
    code += f"\nimport sys; assert not {set(absent.split())} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
