"""The `openai` client, unmodified, against a real cluster."""

import asyncio
import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

CHAT = [
    {"role": "developer", "content": "Answer in one word."},
    {"role": "user", "content": [{"type": "text", "text": "Which city is the capital of Italy?"}]},
]
GREEDY = {"model": "default", "temperature": 0, "max_tokens": 8}


class City(BaseModel):
    name: Literal["Rome", "Paris"]
    is_large: bool


@pytest.fixture
def sdk(cluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models_are_listed(sdk):
    [model] = sdk.models.list().data
    assert sdk.models.retrieve(model.id).id == model.id


def test_a_chat_is_the_same_whole_and_streamed(sdk):
    whole = sdk.chat.completions.create(messages=CHAT, **GREEDY)
    with sdk.chat.completions.stream(
        messages=CHAT, stream_options={"include_usage": True}, **GREEDY
    ) as events:
        streamed = events.get_final_completion()
    assert streamed.choices[0].message.content == whole.choices[0].message.content
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens == 8


def test_completions_of_several_prompts_come_by_their_index(sdk):
    prompts = ["The capital of France is", "Cats and"]
    whole = sdk.completions.create(prompt=prompts, n=2, seed=1, **GREEDY)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].text == whole.choices[1].text != whole.choices[2].text
    texts = dict.fromkeys(range(4), "")
    for chunk in sdk.completions.create(prompt=prompts, n=2, seed=1, stream=True, **GREEDY):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {choice.index: choice.text for choice in whole.choices}


async def test_streams_side_by_side_through_the_asynchronous_client(cluster):
    base = f"{cluster.url}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as sdk:

        async def text_of(prompt: str) -> str:
            stream = await sdk.completions.create(prompt=prompt, stream=True, **GREEDY)
            return "".join([chunk.choices[0].text async for chunk in stream])

        prompts = ["The capital of France is", "Cats and", "One, two,"]
        alone = [await text_of(prompt) for prompt in prompts]
        assert await asyncio.gather(*map(text_of, prompts)) == alone
        assert len(set(alone)) == 3


def test_an_answer_is_parsed_into_a_model(sdk):
    asked = GREEDY | {"max_tokens": 60}
    answer = sdk.chat.completions.parse(messages=CHAT, response_format=City, **asked)
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, City)
    with sdk.chat.completions.stream(messages=CHAT, response_format=City, **asked) as events:
        assert events.get_final_completion().choices[0].message.parsed == parsed


def test_an_error_is_the_clients_own(sdk):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        sdk.chat.completions.create(messages=CHAT, model="default", temperature=-1)
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("other")


def test_headers_and_bodies_can_be_looked_at(sdk):
    raw = sdk.chat.completions.with_raw_response.create(messages=CHAT, logprobs=True, **GREEDY)
    body = json.loads(raw.text)
    assert raw.headers["content-type"].startswith("application/json")
    assert len(body["choices"][0]["logprobs"]["content"]) == 8
    assert raw.parse().choices[0].message.content == body["choices"][0]["message"]["content"]
