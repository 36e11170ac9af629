"""OpenAI's API: `/v1/completions` and `/v1/chat/completions`, as one body or streamed."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from tandem.frontend.answers import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    Completion,
    CompletionChoice,
    CompletionChunk,
    FinishReason,
    OptionalTokenIds,
    TimingsField,
    Usage,
)
from tandem.frontend.apis import answering
from tandem.frontend.chat.generation import Generation
from tandem.frontend.chat.logprobs import ChatLogprobs, CompletionLogprobs
from tandem.frontend.chat.openai_body import OpenAICall, read_chat, read_completion
from tandem.frontend.http.api_errors import error_body
from tandem.frontend.http.sse import DONE, EventStream, encode, event
from tandem.frontend.options import FrontendOptions
from tandem.frontend.replies.tool_calls import Reply, ReplyPart, TextKind, message
from tandem.frontend.text.transcript import Ending, TextPiece
from tandem.wire.errors import ErrorInfo

Logprobs = dict[str, Any] | None
StreamChoice = CompletionChoice | ChatDelta
AnyChoice = TypeVar("AnyChoice", bound=CompletionChoice | ChatChoice | ChatDelta)


async def completions(request: web.Request) -> web.StreamResponse:
    """Answer `/v1/completions`."""
    return await answering.answer(request, read_completion, OpenAIWriter)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer `/v1/chat/completions`."""
    return await answering.answer(request, read_chat, OpenAIWriter)


def _choice(call: OpenAICall, index: int, answer: TextPiece) -> CompletionChoice | ChatChoice:
    return _with_stop(call, _choice_of(call, index, answer), answer.ending)


def _with_stop(call: OpenAICall, choice: AnyChoice, ending: Ending | None) -> AnyChoice:
    """Add `matched_stop` and `stop_reason` to the choice if it ends here."""
    if ending is None or choice.finish_reason is None:
        return choice
    matched = ending.matched
    reason = None if matched in call.eos_token_ids else matched
    return msgspec.structs.replace(choice, matched_stop=matched, stop_reason=reason)


def _choice_of(call: OpenAICall, index: int, answer: TextPiece) -> CompletionChoice | ChatChoice:
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
    parts = call.visible([*reply.push(text), *reply.finish()])
    fields = _with_both_names(message(parts))
    return ChatChoice(index, fields, logprobs, _reason(answer.ending, reply), ids)


def _with_both_names(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a message or delta with the reasoning, if it has any, also under the name that vLLM uses."""
    reasoning = fields.get("reasoning_content")
    return fields if reasoning is None else fields | {"reasoning": reasoning}


def _ids(call: OpenAICall, ids: Sequence[int]) -> OptionalTokenIds:
    """Return the token ids if the client requested them."""
    return list(ids) if call.has_token_ids else msgspec.UNSET


def _prompt_ids(call: OpenAICall, index: int = 0) -> OptionalTokenIds:
    return _ids(call, call.generations[index].request.prompt_ids)


def timings_of(generations: Sequence[Generation]) -> TimingsField:
    """Return the report of the single choice or a list of all, if the client requested it."""
    if not generations[0].timings.is_requested:
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
    if (logprobs := generation.request.logprobs) is None:
        return None
    kind = ChatLogprobs if call.is_chat else CompletionLogprobs
    return kind(generation.tokenizer, logprobs.num_top, has_ids_as_tokens=call.has_ids_as_tokens)


class OpenAIWriter:
    """Writes the answer of one call. A `Writer`.

    In a stream each choice has an opening chunk, text chunks and a final chunk. The usage comes last.
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
        self._choices: list[_ChoiceStream] = []

    def body(self, pieces: Sequence[TextPiece]) -> bytes:
        """Return the answer with one choice per generation."""
        answer: Callable[..., msgspec.Struct] = ChatCompletion if self._call.is_chat else Completion
        num_cached = sum(piece.cached_tokens for piece in pieces)
        extra = {"prompt_token_ids": _prompt_ids(self._call)} if self._call.is_chat else {}
        return encode(
            answer(
                **self._head,
                choices=[_choice(self._call, index, piece) for index, piece in enumerate(pieces)],
                usage=self._usage(sum(len(piece.token_ids) for piece in pieces), num_cached),
                timings=timings_of(self._call.generations),
                **extra,
            )
        )

    def sinks(self, events: EventStream) -> "list[_ChoiceStream]":
        """Return one sink per choice."""
        indexes = range(len(self._call.generations))
        self._choices = [_ChoiceStream(self, events, self._call, index) for index in indexes]
        return self._choices

    def _usage(self, num_output: int, num_cached: int) -> Usage:
        num_prompt = self._call.num_prompt_tokens
        return Usage(num_prompt, num_output, num_prompt + num_output, {"cached_tokens": num_cached})

    def usage(self) -> Usage:
        """Return the usage of all choices so far."""
        num_cached = sum(choice.cached_tokens for choice in self._choices)
        return self._usage(sum(choice.num_tokens for choice in self._choices), num_cached)

    def chunk(self, choice: StreamChoice, usage: Usage | msgspec.Raw) -> bytes:
        """Return one choice as an event, with the usage if the client requested it in every chunk."""
        options = self._call.usage
        extra: dict[str, Any] = {"usage": None} if options.include_usage else {}
        if options.continuous_usage_stats:
            extra = {"usage": usage}
        if isinstance(choice, ChatDelta) and "role" in choice.delta:  # the choice's first chunk
            extra["prompt_token_ids"] = _prompt_ids(self._call)
        return event(self._chunk(**self._head, choices=[choice], **extra))

    def failure(self, choice: StreamChoice, error: ErrorInfo) -> bytes:
        """Return the final event of a choice that failed."""
        detail = error_body(error).error
        return event(self._chunk(**self._head, choices=[choice], error=detail))

    def trailer(self) -> bytes:
        """Return the usage and the timings if the client requested them, then `[DONE]`."""
        events = b""
        if self._call.usage.include_usage:
            events = event(self._chunk(**self._head, usage=self.usage()))
        if (timings := timings_of(self._call.generations)) is not msgspec.UNSET:
            events += event(self._chunk(**self._head, timings=timings))
        return events + DONE


# Placeholders that mark where a chunk's text and usage go. JSON escapes the NUL, so no other text contains them.
_TEXT, _USAGE = "\0text", b'"\\0usage"'
# An ordinary chunk's bytes: those around each place of the text, with those after the usage apart.
_Frame = tuple[tuple[bytes, ...], bytes]


class _ChoiceStream:
    """One choice of a streamed call. A `StreamSink`.

    Attributes:
        num_tokens, cached_tokens: Counts for the usage.
    """

    __slots__ = (
        "_call",
        "_chunks",
        "_echo",
        "_events",
        "_frames",
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
        self._frames: dict[str, _Frame] = {}

    def write(self, piece: TextPiece) -> bool:
        """Send the chunks of a piece. An empty piece sends nothing and returns True."""
        self.num_tokens += len(piece.token_ids)
        if self._is_plain and piece.ending is None:
            if not (text := piece.text):
                return True
            is_text = self._reply is None
            events = self._text_event("content", text) if is_text else self._reply_events(text)
            return not events or self._events.put(events)
        self.cached_tokens = max(self.cached_tokens, piece.cached_tokens)
        usage = self._chunks.usage()
        chunks = [
            self._chunks.chunk(_with_stop(self._call, choice, piece.ending), usage)
            for choice in self._choices(piece)
        ]
        return not chunks or self._events.put(b"".join(chunks))

    def write_failure(self, error: ErrorInfo) -> None:
        """Send the final chunk with an `error` field, which makes OpenAI's client libraries raise."""
        end = (
            self._delta({}, "abort")
            if self._is_chat
            else CompletionChoice(self._index, "", None, "abort")
        )
        self._events.put(self._chunks.failure(end, error))

    def _reply_events(self, text: str) -> bytes:
        """Return the events of new text of a parsed reply, without log-probabilities and ids."""
        assert self._reply is not None
        parts = self._call.visible(self._reply.push(text))
        if len(parts) == 1 and parts[0].kind != "tool_call":
            return self._text_event(parts[0].kind, parts[0].text)
        usage = self._chunks.usage()
        return b"".join([self._chunks.chunk(self._part(part), usage) for part in parts])

    def _text_event(self, kind: TextKind, text: str) -> bytes:
        if kind not in self._frames:
            self._frames[kind] = self._make_frame(kind)
        around, end = self._frames[kind]
        usage = encode(self._chunks.usage()) if self._has_usage else b""
        return b"%b%b%b" % (encode(text).join(around), usage, end)

    def _make_frame(self, kind: TextKind) -> _Frame:
        [choice] = (
            self._texts(_TEXT, None)
            if self._reply is None
            else [self._part(ReplyPart(kind, _TEXT))]
        )
        event = self._chunks.chunk(choice, msgspec.Raw(_USAGE))
        before, _, end = event.partition(_USAGE)
        return tuple(before.split(encode(_TEXT))), end

    def _choices(self, piece: TextPiece) -> Iterator[StreamChoice]:
        """Yield the choices of a piece. Each becomes one chunk."""
        if not self._is_opened:
            self._is_opened = True
            # After the opening, most pieces contain only text.
            has_ids = self._call.has_token_ids
            self._is_plain = self._writer is None and not has_ids
            yield from self._opening(piece)
        logprobs: Logprobs = None
        if self._writer is not None and piece.token_ids:
            logprobs = self._writer.write((piece.token_ids, piece.logprobs))
        reason = _reason(piece.ending, self._reply)
        if self._reply is None:
            text_reason = None if self._is_chat else reason
            yield from self._texts(piece.text, logprobs, text_reason, piece.token_ids)
        else:
            parts = self._reply.push(piece.text)
            if piece.ending is not None:
                parts = [*parts, *self._reply.finish()]
            yield from map(self._part, self._call.visible(parts))
            # Logprobs and ids get their own chunk: they belong to tokens, and the parser may hold text back.
            yield from self._texts("", logprobs, None, piece.token_ids)
            reason = _reason(piece.ending, self._reply)
        if self._is_chat and reason:  # a chat's finish reason comes in a separate chunk
            yield self._delta({}, reason)

    def _opening(self, piece: TextPiece) -> Iterator[StreamChoice]:
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
    ) -> Iterator[StreamChoice]:
        """Yield a choice that adds text, unless it would be empty."""
        ids = _ids(self._call, token_ids)
        if not (text or logprobs or reason or ids):
            return
        if self._is_chat:
            yield ChatDelta(self._index, {"content": text}, logprobs, reason, ids)
        else:
            yield CompletionChoice(self._index, text, logprobs, reason, ids)

    def _part(self, part: ReplyPart) -> ChatDelta:
        return self._delta(_with_both_names(part.delta()))

    def _delta(self, delta: dict[str, Any], reason: FinishReason = None) -> ChatDelta:
        return ChatDelta(self._index, delta, None, reason, _ids(self._call, ()))
