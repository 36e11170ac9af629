"""Reads one streamed answer: when how many tokens had come, and how it ended. No I/O, no clock.

What one read of the socket brings is one arrival. While a stream runs, only the count in its newest event
is looked for, as bytes: that costs less than a tenth of decoding each event. The whole JSON is read of the
first events and of the last ones.

Counts are the server's: `meta_info.completion_tokens` of the native API, `usage.completion_tokens` with
every event of OpenAI's (`continuous_usage_stats`). Where a server sends none with its events, each event
that has text is taken for one token, and the whole is what the last `usage` says.
"""

import re
from array import array
from collections import deque
from typing import Any

import msgspec

from tandem.bench.records import Api, Progress, Sample

_COUNT_KEY = b'"completion_tokens":'
_NUMBER = re.compile(rb"\s*(\d+)")
# The last event with tokens, the one with the usage and [DONE] may each come in a read of their own.
NUM_LAST_READS = 4


class _Cached(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    cached_tokens: int | None = 0
    prompt_tokens_details: _Cached | None = None
    finish_reason: Any = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: Any = None

    def all_text(self) -> str:
        """Return what this event adds, thoughts before words."""
        delta = self.delta or _Delta()
        thought = delta.reasoning_content or delta.reasoning or ""
        return thought + (self.text or delta.content or "")


class _Event(msgspec.Struct):
    meta_info: _Usage | None = None
    output_ids: list[int] | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    object: str = ""
    message: Any = None


_decoder = msgspec.json.Decoder(_Event)


class Broken(Exception):
    """An answer that is not what it should be.

    Attributes:
        kind: Under which it is counted.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Tally:
    """What a client's answers come to since it was last emptied, for who watches."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.num_tokens = 0
        self.first_token_s: list[float] = []
        self.gap_s = 0.0
        self.num_gaps = 0

    def take(self, num_running: int, samples: list[Sample]) -> Progress:
        """Return what it comes to, with what else is to be told, and empty it."""
        told = Progress(
            num_running=num_running,
            num_tokens=self.num_tokens,
            first_token_s=self.first_token_s,
            gap_s=self.gap_s,
            num_gaps=self.num_gaps,
            samples=samples,
        )
        self._clear()
        return told


class Answer:
    """One answer while it comes.

    Args:
        api: Whose events they are.
        sent_s: When the request was sent.
        tally: Told of every arrival.
        is_kept: Whether its text or ids are wanted at the end.

    Attributes:
        heard_s: When something came last, or the request was sent.
        num_tokens: That have come.
    """

    def __init__(self, api: Api, sent_s: float, tally: Tally, *, is_kept: bool = False) -> None:
        self.sent_s = self.heard_s = sent_s
        self.num_tokens = 0
        self.times = array("d")
        self.counts = array("I")
        self.output_tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.text = ""
        self.output_ids: list[int] = []
        self._tally = tally
        # Whether events carry counts; None until one with a token has told.
        self._is_counted: bool | None = True if api == "native" else None
        self._partial = b""
        self._reads: deque[bytes] = deque(maxlen=None if is_kept else NUM_LAST_READS)

    def feed(self, data: bytes, now_s: float) -> None:
        """Take what one read brought of the body.

        Raises:
            Broken: It holds an error, or no events.
        """
        self.heard_s = now_s
        if b"\r" in data:  # lines may end so; within JSON it is always escaped
            data = data.replace(b"\r", b"")
        if self._partial:
            data = self._partial + data
        end = data.rfind(b"\n\n") + 2
        if end == 1:
            self._partial = data
            return
        self._partial = data[end:]
        whole = data[:end] if self._partial else data
        self._reads.append(whole)
        count = self._count(whole)
        if count > self.num_tokens:
            self._arrive(count, now_s)

    def _arrive(self, count: int, now_s: float) -> None:
        at_s, tally = now_s - self.sent_s, self._tally
        tally.num_tokens += count - self.num_tokens
        if self.times:
            tally.gap_s += at_s - self.times[-1]
            tally.num_gaps += count - self.num_tokens
        else:
            tally.first_token_s.append(at_s)
        self.times.append(at_s)
        self.counts.append(count)
        self.num_tokens = count

    def _count(self, whole: bytes) -> int:
        """Return how many tokens have come with these events."""
        if self._is_counted and (at := whole.rfind(_COUNT_KEY)) >= 0:
            number = _NUMBER.match(whole, at + len(_COUNT_KEY))
            return int(number[1]) if number else self.num_tokens
        count = self.num_tokens
        for event in _events(whole):
            has_text = any(choice.all_text() for choice in event.choices)
            told = (event.usage and event.usage.completion_tokens) or 0
            if self._is_counted is None and event.choices and (has_text or told):
                self._is_counted = told > 0
            if self._is_counted:
                count = max(count, told)
            elif has_text:
                count += 1
        return count

    def finish(self) -> None:
        """Take the end of the body; fills in what only the last events say.

        Raises:
            Broken: The stream was cut off, aborted, or ended in an error.
        """
        whole = b"".join(self._reads) + self._partial
        is_ended = b"data: [DONE]" in whole[-64:]
        usage = _Usage()
        for event in _events(whole):
            usage = event.meta_info or event.usage or usage
            self.text += "".join(choice.all_text() for choice in event.choices)
            self._take_ids(event.output_ids or [], usage.completion_tokens or 0)
            reasons = [usage.finish_reason, *(choice.finish_reason for choice in event.choices)]
            for reason in filter(None, reasons):
                is_ended = True
                _refuse_abort(reason)
        self.output_tokens = usage.completion_tokens or self.num_tokens
        self.prompt_tokens = usage.prompt_tokens or 0
        details = usage.prompt_tokens_details or _Cached()
        self.cached_tokens = usage.cached_tokens or details.cached_tokens or 0
        if not is_ended:
            raise Broken(
                "cut off", f"the stream ended after {self.num_tokens} tokens, before its end"
            )

    def _take_ids(self, ids: list[int], count: int) -> None:
        """Add the ids of an event of the native API: all so far, or what is new."""
        is_all = len(ids) == count
        self.output_ids = ids if is_all and ids else self.output_ids + ids


def _events(whole: bytes) -> list[_Event]:
    """Decode events.

    Raises:
        Broken: One is an error, or no JSON object as it should be.
    """
    found = []
    for line in whole.split(b"\n"):
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        try:
            event = _decoder.decode(line[5:])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Broken("bad event", f"{error}: {line[:200]!r}") from error
        if event.error is not None or event.object == "error":
            raise Broken("error event", line[5:205].decode(errors="replace").strip())
        found.append(event)
    return found


def _refuse_abort(reason: object) -> None:
    if reason == "abort":
        raise Broken("aborted", "finish_reason is abort")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise Broken("aborted", str(reason.get("message") or reason))
