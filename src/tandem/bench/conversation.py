"""The requests of one conversation: each a body as its API wants it."""

import msgspec

from tandem.bench.answer import Answer
from tandem.bench.prompts import PromptMaker
from tandem.bench.records import ClientPlan, Job, Server, Turn

PATHS = {"native": "/generate", "completions": "/v1/completions", "chat": "/v1/chat/completions"}

_encoder = msgspec.json.Encoder()


class Conversation:
    """What was said so far, as the API wants it. Ids where it takes and gives them, else text."""

    def __init__(self, plan: ClientPlan, maker: PromptMaker, job: Job) -> None:
        self._server, self._maker, self._job = plan.server, maker, job
        self._said: list[int] = []
        self._text = ""
        self._messages: list[dict[str, str]] = []
        self.is_kept = len(job.turns) > 1

    def body(self, number: int) -> bytes:
        """Say a turn; return the body of its request."""
        turn = self._job.turns[number]
        fields = {**self._fields(number), **_lengths(self._server, turn), "stream": True}
        return _encoder.encode(fields | self._server.extra_body)

    def _fields(self, number: int) -> dict[str, object]:
        if self._server.api == "native":
            self._said += self._maker.ids(self._job, number)
            return {"input_ids": self._said}
        if self._server.api == "chat":
            self._messages.append({"role": "user", "content": self._maker.text(self._job, number)})
            return {"messages": self._messages}
        if not self.is_kept:
            return {"prompt": self._maker.ids(self._job, number)}
        self._text += (" " if number else "") + self._maker.text(self._job, number)
        return {"prompt": self._text}

    def hear(self, answer: Answer) -> None:
        """Add an answer."""
        self._said += answer.output_ids
        self._text += answer.text
        self._messages.append({"role": "assistant", "content": answer.text})


def _lengths(server: Server, turn: Turn) -> dict[str, object]:
    if server.api == "native":
        sampling = {"max_new_tokens": turn.output_tokens, "temperature": 0}
        return {"sampling_params": sampling | {"ignore_eos": server.is_eos_ignored}}
    fields: dict[str, object] = {
        "model": server.model,
        "max_tokens": turn.output_tokens,
        "temperature": 0,
        # A count with every event: a token whose text is empty is one, too.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    # Servers that do not know it refuse it when it is there at all.
    return fields | ({"ignore_eos": True} if server.is_eos_ignored else {})
