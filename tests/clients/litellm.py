#!/usr/bin/env python3
"""LiteLLM: chats, streams and completions as `hosted_vllm/`, and messages as `anthropic/`."""

import json

from client import Target, expect, main, version

SCRIPT = """
import json, sys
import litellm

url, model = sys.argv[1:]
litellm.telemetry = False
say = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 24, "temperature": 0, "api_key": "none"}
vllm = {"model": "hosted_vllm/" + model, "api_base": url + "/v1"}
whole = litellm.completion(**vllm, **say)
streamed = "".join(
    piece.choices[0].delta.content or "" for piece in litellm.completion(**vllm, **say, stream=True)
)
claude = litellm.completion(model="anthropic/" + model, api_base=url, **say)
text = whole.choices[0].message.content
print(json.dumps({
    "is_same": text == streamed,
    "tokens": whole.usage.completion_tokens,
    "anthropic": claude.choices[0].message.content == text,
}))
"""


def check(target: Target) -> tuple[str, str]:
    python = target.python("litellm", ["install", "litellm==1.106.2"])
    (target.out / "script.py").write_text(SCRIPT)
    said = target.run(python, "script.py", target.url, target.model)
    found = json.loads(said.splitlines()[-1])
    for name in ("is_same", "anthropic"):
        expect(name, found[name], True)
    return version(python, "litellm"), f"chat, stream, messages: {found}"


main("litellm", check)
