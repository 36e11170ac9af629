#!/usr/bin/env python3
"""langchain-openai: a chat, a stream, a tool call, structured output, and the Responses API."""

import json

from client import Target, expect, main, version

SCRIPT = """
import json, sys
from typing import Literal
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

class City(BaseModel):
    name: Literal["Rome", "Paris"]

url, model = sys.argv[1:]
same = {"base_url": url + "/v1", "api_key": "none", "model": model, "max_tokens": 60, "temperature": 0}
chat = ChatOpenAI(**same)
whole = chat.invoke("Say hello.")
streamed = "".join(piece.content for piece in chat.stream("Say hello."))
forced = chat.bind_tools([City], tool_choice="required").invoke("Name a city.")
city = chat.with_structured_output(City).invoke("Name a city.")
newer = ChatOpenAI(**same, use_responses_api=True).invoke("Say hello.")
print(json.dumps({
    "is_same": whole.content == streamed,
    "tokens": whole.usage_metadata["output_tokens"],
    "call": forced.tool_calls[0]["name"] if forced.tool_calls else "",
    "city": city.name in ("Rome", "Paris"),
    "responses": newer.text == whole.text,
}))
"""


def check(target: Target) -> tuple[str, str]:
    python = target.python("langchain_openai", ["install", "langchain-openai==1.7.3"])
    (target.out / "script.py").write_text(SCRIPT)
    said = target.run(python, "script.py", target.url, target.model)
    found = json.loads(said.splitlines()[-1])
    for name in ("is_same", "city", "responses"):
        expect(name, found[name], True)
    expect("the tool", found["call"], "City")
    return version(python, "langchain-openai"), f"chat, stream, call, schema, responses: {found}"


main("langchain_openai", check)
