"""The clients of a cluster under test, and what is said of what they got."""

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import aiohttp
import numpy as np

from tandem.engine.config import EngineConfig
from tandem.engine.simulated import answer_key, read_model, tokens_at
from tandem.wire.keys import operator_key
from tests.faults.rig import SECRET

# A client that has waited so long waits for ever: no cell of the matrix has a reason to.
HUNG_AFTER_S = 60.0
# Events of a stream's beginning: after the first token, the KV is waited for.
NUM_EARLY = 8

SEEDED = {"temperature": 0.8}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request and the tokens that are right."""

    url: str
    body: dict
    expected: tuple[int, ...]
    is_streamed: bool = True


@dataclass(frozen=True, slots=True)
class Pauses:
    """The longest pause of a stream's beginning, where prompt and KV are waited for, and of what follows."""

    early_s: float = 0.0
    late_s: float = 0.0

    def beyond(self, usual: "Pauses") -> float:
        """Return how much longer one of them is than usual, in seconds."""
        return max(0.0, self.early_s - usual.early_s, self.late_s - usual.late_s)

    def longer(self, other: "Pauses") -> "Pauses":
        return Pauses(max(self.early_s, other.early_s), max(self.late_s, other.late_s))


@dataclass(slots=True)
class Answer:
    """What a client got.

    Attributes:
        error: Code of a typed error, `connection lost`, or `hung`; empty when there was none.
        times_s: When the request went out, and when each event came.
    """

    ask: Ask
    token_ids: list[int] = field(default_factory=list)
    error: str = ""
    message: str = ""
    times_s: list[float] = field(default_factory=list)
    is_done: bool = False

    def longest_pauses_s(self, since_s: float = 0.0) -> "Pauses":
        """Return the longest times between events, of those that ended since a moment."""
        early, late = 0.0, 0.0
        for number, (before_s, now_s) in enumerate(itertools.pairwise(self.times_s)):
            if now_s >= since_s and number <= NUM_EARLY:
                early = max(early, now_s - before_s)
            elif now_s >= since_s:
                late = max(late, now_s - before_s)
        return Pauses(early, late)

    def verdict(self) -> "Verdict":
        """Say how the tokens differ from the right ones."""
        got, right = self.token_ids, list(self.ask.expected)
        if self.error:
            right = right[: len(got)]
        return compare(got, right)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Tokens lost, repeated and wrong; all 0 when every one is right."""

    lost: int = 0
    repeated: int = 0
    wrong: int = 0

    @property
    def is_right(self) -> bool:
        return not (self.lost or self.repeated or self.wrong)


def compare(got: Sequence[int], right: Sequence[int]) -> Verdict:
    """Tell what became of the right tokens on their way.

    What follows the first difference is looked for in what is right: behind it (tokens were lost) or
    before it (tokens came twice); found nowhere it is wrong.
    """
    got, right = list(got), list(right)
    if got == right:
        return Verdict()
    at = next((i for i, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), None)
    if at is None:
        return Verdict(lost=max(0, len(right) - len(got)), wrong=max(0, len(got) - len(right)))
    tail = got[at : at + 4]
    for behind in range(at + 1, len(right)):
        if right[behind : behind + len(tail)] == tail:
            return Verdict(lost=behind - at)
    for before in range(at - 1, -1, -1):
        if right[before : before + len(tail)] == tail:
            return Verdict(repeated=at - before)
    return Verdict(wrong=len(got) - at)


class Measured:
    """Knows the answers of a real model: those that an undisturbed run gave."""

    num_ids = 300

    def ask(
        self,
        url: str,
        prompt: list[int],
        num_new: int,
        *,
        seed: int | None = None,
        stops_at: int | None = None,
        is_streamed: bool = True,
    ) -> Ask:
        """Make a request whose answer is not known yet; it has no stop id, for want of one."""
        del stops_at
        params: dict = {"max_new_tokens": num_new, "ignore_eos": True}
        params |= {"temperature": 0} if seed is None else {**SEEDED, "sampling_seed": seed}
        body = {"input_ids": prompt, "sampling_params": params, "stream": is_streamed}
        return Ask(url, body, (), is_streamed)

    async def known(self, session: aiohttp.ClientSession, asks: list[Ask]) -> list[Ask]:
        """Return the requests with their answers, and caches as if nobody had asked."""
        answers = [Answer(ask) for ask in asks]
        await asyncio.gather(*(send(session, answer) for answer in answers))
        assert not any(answer.error for answer in answers), answers
        headers = {"Authorization": f"Bearer {operator_key(SECRET)}"}
        for url in {ask.url for ask in asks}:
            async with session.post(f"{url}/flush_cache", headers=headers) as answer:
                assert answer.ok, await answer.text()
        return [replace(a.ask, expected=tuple(a.token_ids)) for a in answers]


class Arithmetic:
    """Knows every answer of a simulated cluster.

    Attributes:
        num_ids: Prompts are made of ids below it.
    """

    num_ids = 40_000

    async def known(self, session: aiohttp.ClientSession, asks: list[Ask]) -> list[Ask]:
        """Return the requests, whose answers are known."""
        del session
        return asks

    def __init__(self, model_dir: str) -> None:
        _, self._ordinary = read_model(EngineConfig(model_dir=model_dir), "none")

    def tokens(self, prompt: list[int], num_new: int, seed: int = 0) -> list[int]:
        keys = np.full(num_new, answer_key(prompt, seed), np.uint64)
        return tokens_at(keys, np.arange(num_new), self._ordinary).tolist()

    def ask(
        self,
        url: str,
        prompt: list[int],
        num_new: int,
        *,
        seed: int | None = None,
        stops_at: int | None = None,
        is_streamed: bool = True,
    ) -> Ask:
        """Make a request: greedy, or sampled with a seed; ended by its length, or by a stop id.

        Args:
            stops_at: Index of the token whose id is given as a stop.
        """
        right = self.tokens(prompt, num_new, seed or 0)
        params: dict = {"max_new_tokens": num_new, "temperature": 0}
        if seed is not None:
            params |= {**SEEDED, "sampling_seed": seed}
        if stops_at is not None:
            params["stop_token_ids"] = [right[stops_at]]
            right = right[: right.index(right[stops_at]) + 1]
        body = {"input_ids": prompt, "sampling_params": params, "stream": is_streamed}
        return Ask(url, body, tuple(right), is_streamed)


async def send(session: aiohttp.ClientSession, answer: Answer) -> Answer:
    """Send a request and keep what comes, in `answer` as it comes; no failure is raised."""
    answer.times_s.append(time.monotonic())
    try:
        async with asyncio.timeout(HUNG_AFTER_S):
            await _send(session, answer)
            if not answer.is_done and not answer.error:
                answer.error = "connection lost"
    except TimeoutError:
        answer.error = "hung"
    except (aiohttp.ClientError, OSError) as error:
        answer.error, answer.message = "connection lost", repr(error)
    return answer


async def _send(session: aiohttp.ClientSession, answer: Answer) -> None:
    ask = answer.ask
    async with session.post(f"{ask.url}/generate", json=ask.body) as response:
        if response.status != 200 or not ask.is_streamed:
            body = await response.json()
            answer.times_s.append(time.monotonic())
            _take(answer, body)
            answer.is_done = not answer.error
            return
        async for line in response.content:
            if line.startswith(b"data: {"):
                answer.times_s.append(time.monotonic())
                _take(answer, json.loads(line[6:]))
            elif line.startswith(b"data: [DONE]"):
                answer.is_done = True


def _take(answer: Answer, body: dict) -> None:
    if "error" in body:
        error = body["error"]
        answer.error = str(error.get("code") or error.get("type"))
        answer.message = str(error.get("message"))
        return
    reason = body["meta_info"]["finish_reason"]
    if reason is not None and reason["type"] == "abort":
        answer.error = str(reason.get("err_type") or "abort")
        answer.message = str(reason.get("message"))
    known = answer.token_ids
    if body["output_ids"][: len(known)] != known:
        answer.error = "tokens were taken back"
    answer.token_ids = body["output_ids"]
