"""OpenAI's API: `/v1/completions` and `/v1/chat/completions`, answered whole or streamed."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from tandem.frontend import answering
from tandem.frontend.answers import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    Completion,
    CompletionChoice,
    CompletionChunk,
    FinishReason,
    Timings,
    TokenIds,
    Usage,
)
from tandem.frontend.generation import Generation
from tandem.frontend.logprobs import ChatLogprobs, CompletionLogprobs
from tandem.frontend.middleware import error_body
from tandem.frontend.openai_body import OpenAICall, read_chat, read_completion
from tandem.frontend.options import FrontendOptions
from tandem.frontend.sse import DONE, EventStream, encode, event
from tandem.frontend.tool_calls import Part, Reply, message
from tandem.frontend.transcript import Ending, Piece
from tandem.wire.errors import ErrorInfo

Logprobs = dict[str, Any] | None
Choice = CompletionChoice | ChatDelta
AnyChoice = TypeVar("AnyChoice", bound=CompletionChoice | ChatChoice | ChatDelta)


async def completions(request: web.Request) -> web.StreamResponse:
    """Answer `/v1/completions`."""
    return await answering.answer(request, read_completion, OpenAIWriter)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer `/v1/chat/completions`."""
    return await answering.answer(request, read_chat, OpenAIWriter)


def _choice(call: OpenAICall, index: int, answer: Piece) -> CompletionChoice | ChatChoice:
    return _with_stop(call, _choice_of(call, index, answer), answer.ending)


def _with_stop(call: OpenAICall, choice: AnyChoice, ending: Ending | None) -> AnyChoice:
    """Return a choice with what ended it, if it ended here."""
    if ending is None or choice.finish_reason is None:
        return choice
    matched = ending.matched
    reason = None if matched in call.eos_token_ids else matched
    return msgspec.structs.replace(choice, matched_stop=matched, stop_reason=reason)


def _choice_of(call: OpenAICall, index: int, answer: Piece) -> CompletionChoice | ChatChoice:
    logprobs: Logprobs = None
    if (writer := _writer(call, index)) is not None:
        prompt_run = (call.generations[index].request.prompt_ids, answer.prompt_logprobs)
        logprobs = writer.write(prompt_run, (answer.token_ids, answer.logprobs))
    reason = _reason(answer.ending)
    text, ids = call.echoes[index] + answer.text, _ids(call, answer.token_ids)
    if not call.is_chat:
        return CompletionChoice(index, text, logprobs, reason, ids, _prompt_ids(call, index))
    if call.make_reply is None:
        return ChatChoice(index, {"role": "assistant", "content": text}, logprobs, reason, ids)
    reply = call.make_reply()
    parts = _shown(call, [*reply.push(text), *reply.finish()])
    return ChatChoice(index, message(parts), logprobs, _reason(answer.ending, reply), ids)


def _shown(call: OpenAICall, parts: Sequence[Part]) -> list[Part]:
    """Return the parts of a reply that the client wants to see."""
    return [part for part in parts if call.has_reasoning or part.kind != "reasoning_content"]


def _ids(call: OpenAICall, ids: Sequence[int]) -> TokenIds:
    """Return token ids if the client wants to see them."""
    return list(ids) if call.has_token_ids else msgspec.UNSET


def _prompt_ids(call: OpenAICall, index: int = 0) -> TokenIds:
    return _ids(call, call.generations[index].request.prompt_ids)


def timings_of(generations: Sequence[Generation]) -> Timings:
    """Return the report of the one choice, or of each, if the client asked for it."""
    if not generations[0].timings.is_wanted:
        return msgspec.UNSET
    reports = [generation.report() for generation in generations]
    return reports if len(reports) > 1 else reports[0]


def _reason(ending: Ending | None, reply: Reply | None = None) -> FinishReason:
    if ending is None:
        return None
    if reply is not None and ending.reason == "stop":
        return reply.finish_reason
    return ending.reason


def _writer(call: OpenAICall, index: int) -> CompletionLogprobs | ChatLogprobs | None:
    generation = call.generations[index]
    if (wanted := generation.request.logprobs) is None:
        return None
    kind = ChatLogprobs if call.is_chat else CompletionLogprobs
    return kind(generation.tokenizer, wanted.num_top, has_ids_as_tokens=call.has_ids_as_tokens)


class OpenAIWriter:
    """Writes the answer of one call. A `Writer`.

    In a stream each choice has an opening, its text and its end; then comes the usage.
    """

    def __init__(self, call: OpenAICall, _options: FrontendOptions) -> None:
        self._call = call
        kind = "text_completion"
        if call.is_chat:
            kind = "chat.completion.chunk" if call.is_stream else "chat.completion"
        self._head = {
            "id": call.call_id,
            "object": kind,
            "created": int(time.time()),
            "model": call.model_name,
        }
        self._chunk: Callable[..., msgspec.Struct] = (
            ChatCompletionChunk if call.is_chat else CompletionChunk
        )
        self._choices: list[_Choice] = []

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        """Return the answer with a choice for each generation."""
        whole: Callable[..., msgspec.Struct] = ChatCompletion if self._call.is_chat else Completion
        num_cached = sum(piece.cached_tokens for piece in pieces)
        extra = {"prompt_token_ids": _prompt_ids(self._call)} if self._call.is_chat else {}
        return encode(
            whole(
                **self._head,
                choices=[_choice(self._call, index, piece) for index, piece in enumerate(pieces)],
                usage=self._usage(sum(len(piece.token_ids) for piece in pieces), num_cached),
                timings=timings_of(self._call.generations),
                **extra,
            )
        )

    def sinks(self, events: EventStream) -> "list[_Choice]":
        """Return what writes each choice to the stream."""
        indexes = range(len(self._call.generations))
        self._choices = [_Choice(self, events, self._call, index) for index in indexes]
        return self._choices

    def _usage(self, num_output: int, num_cached: int) -> Usage:
        num_prompt = self._call.num_prompt_tokens
        return Usage(num_prompt, num_output, num_prompt + num_output, {"cached_tokens": num_cached})

    def usage(self) -> Usage:
        """Return the usage of all choices so far."""
        num_cached = sum(choice.cached_tokens for choice in self._choices)
        return self._usage(sum(choice.num_tokens for choice in self._choices), num_cached)

    def chunk(self, choice: Choice, usage: Usage | msgspec.Raw) -> bytes:
        """Return one choice as an event, with the usage if the client wants it with every chunk."""
        options = self._call.usage
        extra: dict[str, Any] = {"usage": None} if options.include_usage else {}
        if options.continuous_usage_stats:
            extra = {"usage": usage}
        if isinstance(choice, ChatDelta) and "role" in choice.delta:  # the first of its choice
            extra["prompt_token_ids"] = _prompt_ids(self._call)
        return event(self._chunk(**self._head, choices=[choice], **extra))

    def failure(self, choice: Choice, error: ErrorInfo) -> bytes:
        """Return the end of a choice that an error cut short."""
        detail = error_body(error).error
        return event(self._chunk(**self._head, choices=[choice], error=detail))

    def summary(self) -> bytes:
        """Return the usage and the timings, where the client wants them, and the end."""
        found = b""
        if self._call.usage.include_usage:
            found = event(self._chunk(**self._head, usage=self.usage()))
        if (timings := timings_of(self._call.generations)) is not msgspec.UNSET:
            found += event(self._chunk(**self._head, timings=timings))
        return found + DONE


# Stand for what changes from chunk to chunk, to find its place. No text has them: it is escaped.
_TEXT, _USAGE = "\0text", b'"\\0usage"'


class _Choice:
    """One choice of a streamed call. A `StreamSink`.

    Attributes:
        num_tokens, cached_tokens: For the usage.
    """

    __slots__ = (
        "_call",
        "_chunks",
        "_echo",
        "_events",
        "_frame",
        "_has_usage",
        "_index",
        "_is_chat",
        "_is_opened",
        "_is_plain",
        "_reply",
        "_writer",
        "cached_tokens",
        "drain",
        "generation",
        "num_tokens",
    )

    def __init__(
        self, chunks: OpenAIWriter, events: EventStream, call: OpenAICall, index: int
    ) -> None:
        self._call, self.generation = call, call.generations[index]
        self.num_tokens = self.cached_tokens = 0
        self._chunks, self._index, self._is_chat = chunks, index, call.is_chat
        self._events, self.drain = events, events.drain
        self._echo = call.echoes[index]
        self._writer = _writer(call, index)
        self._reply = call.make_reply() if call.make_reply is not None else None
        self._is_opened = self._is_plain = False
        self._has_usage = call.usage.continuous_usage_stats
        # Of an ordinary chunk: before its text, up to its usage, to its end.
        self._frame: tuple[bytes, bytes, bytes] | None = None

    def write(self, piece: Piece) -> bool:
        """Send the chunks of a piece. One without news leaves the room as it is."""
        self.num_tokens += len(piece.token_ids)
        if self._is_plain and piece.ending is None:
            return not piece.text or self._write_text(piece.text)
        self.cached_tokens = max(self.cached_tokens, piece.cached_tokens)
        usage = self._chunks.usage()
        chunks = [
            self._chunks.chunk(_with_stop(self._call, choice, piece.ending), usage)
            for choice in self._choices(piece)
        ]
        return not chunks or self._events.put(b"".join(chunks))

    def write_failure(self, error: ErrorInfo) -> None:
        """Send the end of the choice. Clients of OpenAI's raise on `error` beside it."""
        end = (
            self._delta({}, "abort")
            if self._is_chat
            else CompletionChoice(self._index, "", None, "abort")
        )
        self._events.put(self._chunks.failure(end, error))

    def _write_text(self, text: str) -> bool:
        if self._frame is None:
            self._frame = self._make_frame()
        before, between, end = self._frame
        usage = encode(self._chunks.usage()) if self._has_usage else b""
        return self._events.put(b"%b%b%b%b%b" % (before, encode(text), between, usage, end))

    def _make_frame(self) -> tuple[bytes, bytes, bytes]:
        [choice] = self._texts(_TEXT, None)
        before, _, rest = self._chunks.chunk(choice, msgspec.Raw(_USAGE)).partition(encode(_TEXT))
        between, _, end = rest.partition(_USAGE)
        return before, between, end

    def _choices(self, piece: Piece) -> Iterator[Choice]:
        """Yield the choices, one a chunk, that a piece makes."""
        if not self._is_opened:
            self._is_opened = True
            # From here on most pieces are but text.
            has_ids = self._call.has_token_ids
            self._is_plain = self._writer is None and self._reply is None and not has_ids
            yield from self._opening(piece)
        logprobs: Logprobs = None
        if self._writer is not None and piece.token_ids:
            logprobs = self._writer.write((piece.token_ids, piece.logprobs))
        reason = _reason(piece.ending, self._reply)
        if self._reply is None:
            own = None if self._is_chat else reason
            yield from self._texts(piece.text, logprobs, own, piece.token_ids)
        else:
            parts = self._reply.push(piece.text)
            if piece.ending is not None:
                parts = [*parts, *self._reply.finish()]
            yield from (self._delta(part.delta()) for part in _shown(self._call, parts))
            # They belong to tokens: text that a reader holds back has none of its own.
            yield from self._texts("", logprobs, None, piece.token_ids)
            reason = _reason(piece.ending, self._reply)
        if self._is_chat and reason:  # the end of a chat has a chunk of its own
            yield self._delta({}, reason)

    def _opening(self, piece: Piece) -> Iterator[Choice]:
        if self._is_chat:
            yield self._delta({"role": "assistant", "content": ""})
            return
        logprobs: Logprobs = None
        if self._writer is not None:
            logprobs = self._writer.write(
                (self.generation.request.prompt_ids, piece.prompt_logprobs)
            )
        prompt_ids = _prompt_ids(self._call, self._index)
        if self._echo or prompt_ids or (logprobs is not None and logprobs["tokens"]):
            ids = _ids(self._call, ())
            yield CompletionChoice(self._index, self._echo, logprobs, None, ids, prompt_ids)

    def _texts(
        self,
        text: str,
        logprobs: Logprobs,
        reason: FinishReason = None,
        token_ids: Sequence[int] = (),
    ) -> Iterator[Choice]:
        """Yield a choice that adds text. One without news is not worth a chunk."""
        ids = _ids(self._call, token_ids)
        if not (text or logprobs or reason or ids):
            return
        if self._is_chat:
            yield ChatDelta(self._index, {"content": text}, logprobs, reason, ids)
        else:
            yield CompletionChoice(self._index, text, logprobs, reason, ids)

    def _delta(self, delta: dict[str, Any], reason: FinishReason = None) -> ChatDelta:
        return ChatDelta(self._index, delta, None, reason, _ids(self._call, ()))
