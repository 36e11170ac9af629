"""Bodies of OpenAI's API, parsed into checked generations. `frontend/apis/openai.py` writes the answers."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from tandem.frontend.backend import ServedModel
from tandem.frontend.chat.body import (
    UNSUPPORTED_IN_CHATS,
    Body,
    ModelBody,
    refuse_unsupported,
    validate,
    without_nulls,
)
from tandem.frontend.chat.generation import (
    Generation,
    PromptOptions,
    Prompts,
    TextsOrIds,
    create_generations,
    prompt_ids,
    read_prompts,
    require_tokenizer,
)
from tandem.frontend.chat.grammars import SentGrammar, after_reasoning, openai_grammar, strict_calls
from tandem.frontend.chat.logprobs import MAX_TOP_LOGPROBS
from tandem.frontend.chat.messages import ChatMessage, Tool, as_sent
from tandem.frontend.chat.sampling import (
    CompletionSampling,
    OpenAISampling,
    read_sampling,
    require_tokens,
)
from tandem.frontend.chat.tool_choice import ToolChoice, read_choice
from tandem.frontend.options import FrontendOptions
from tandem.frontend.replies.formats import ReasoningMarks
from tandem.frontend.replies.parser import ReplyFormats
from tandem.frontend.replies.tool_calls import Reply, ReplyPart
from tandem.frontend.request_ids import ids_of
from tandem.frontend.schemas.budget import Budget
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import Grammar, LogprobOptions, new_request_id

# The longest real conversations have hundreds of messages.
MAX_MESSAGES = 8192
# Variables by which chat templates enable or disable reasoning.
THINKING_SWITCHES = frozenset({"enable_thinking", "thinking"})


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class OpenAIBody(ModelBody):
    """Fields that OpenAI's routes share, except sampling parameters."""

    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)


OpenAIBodyT = TypeVar("OpenAIBodyT", bound=OpenAIBody)
NumTop = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]


class CompletionBody(OpenAIBody, kw_only=True):
    """`/v1/completions`."""

    prompt: TextsOrIds
    add_special_tokens: bool = True
    echo: bool = False
    logprobs: NumTop | bool | None = None

    def engine_logprobs(self) -> LogprobOptions | None:
        """Return the log-probabilities to request from the engine, including those of an echoed prompt."""
        if self.logprobs is True:
            raise InvalidRequest("logprobs: must be an integer")
        if self.logprobs is None or self.logprobs is False:
            return None
        return LogprobOptions(num_top=self.logprobs, prompt_start=0 if self.echo else -1)


class ChatOptions(OpenAIBody):
    """Fields of a chat, except its messages and tools."""

    tool_choice: Any = None
    parallel_tool_calls: bool = True
    separate_reasoning: bool = True
    include_reasoning: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    logprobs: bool = False
    top_logprobs: NumTop = 0

    def engine_logprobs(self) -> LogprobOptions | None:
        """Return the log-probabilities to request from the engine."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: requires logprobs; set logprobs to true")
        return LogprobOptions(num_top=self.top_logprobs) if self.logprobs else None

    def for_template(self) -> dict[str, Any]:
        """Return additional variables for the template."""
        effort = without_nulls({"reasoning_effort": self.reasoning_effort})
        return effort | without_nulls(self.chat_template_kwargs)


class ChatBody(ChatOptions, kw_only=True):
    """`/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    tools: list[Tool] = msgspec.field(default_factory=list)


@dataclass(slots=True)
class Chat:
    """A checked chat of any API, with messages and tools as templates take them."""

    options: ChatOptions
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]

    @property
    def choice(self) -> ToolChoice:
        """The client's choice of tools."""
        options = self.options
        return read_choice(self.tools, options.tool_choice, is_parallel=options.parallel_tool_calls)


@dataclass(slots=True)
class OpenAICall:
    """One checked call.

    Attributes:
        generations: Generations ordered by prompt. The position is the choice's index.
        num_prompt_tokens: Tokens of all prompts. A prompt with several choices counts once.
        echoes: Text prepended to each choice.
        has_token_ids: Whether the answer contains the token ids of choices and prompts.
        has_ids_as_tokens: Whether log-probabilities identify tokens by id instead of text.
        eos_token_ids: End-of-sequence tokens of the model.
        has_reasoning: Whether the answer contains the reasoning, if it is parsed separately; see `visible`.
        make_reply: Creates the parser of one choice's text. None: all text is content.
    """

    call_id: str
    model_name: str
    is_chat: bool
    generations: list[Generation]
    num_prompt_tokens: int
    echoes: list[str]
    is_stream: bool
    usage: StreamOptions
    has_token_ids: bool
    has_ids_as_tokens: bool
    eos_token_ids: Collection[int] = ()
    has_reasoning: bool = True

    def visible(self, parts: Sequence[ReplyPart]) -> list[ReplyPart]:
        """Return the parts of a reply without the reasoning, if the client excluded it."""
        return [part for part in parts if self.has_reasoning or part.kind != "reasoning_content"]

    make_reply: Callable[[], Reply] | None = None


def read_completion(
    model: ServedModel, _options: FrontendOptions, data: dict[str, Any]
) -> OpenAICall:
    """Check a body of `/v1/completions`."""
    body = read_body(CompletionBody, model, data)
    sampling = read_sampling(CompletionSampling, data, model)
    if not body.echo:
        require_tokens(sampling, "max_tokens")
    prompts, sent = read_prompts(body.prompt), openai_grammar(data)
    grammar = None if sent is None else sent.served(Budget())
    options = PromptOptions(sampling, grammar, body.engine_logprobs())
    call = _call(model, body, options, prompts, id_prefix="cmpl-")
    if body.echo:
        call.echoes = [text for text in _texts(model, prompts) for _ in range(sampling.n)]
    return call


def read_chat(model: ServedModel, options: FrontendOptions, data: dict[str, Any]) -> OpenAICall:
    """Check a body of `/v1/chat/completions`."""
    chat = checked_chat(model, data)
    sampling = read_sampling(OpenAISampling, data, model)
    return make_call(model, options, chat, sampling, openai_grammar(data), id_prefix="chatcmpl-")


def make_call(
    model: ServedModel,
    options: FrontendOptions,
    chat: Chat,
    sampling: OpenAISampling,
    body_grammar: SentGrammar | None,
    *,
    id_prefix: str,
) -> OpenAICall:
    """Create the generations of a chat. `body_grammar` is the client's grammar."""
    choice, body = chat.choice, chat.options
    text = chat_text(model, chat, choice)
    if body_grammar is not None and choice.is_forced:
        raise InvalidRequest(
            "tool_choice: a forced call cannot be combined with a grammar; leave one of them out"
        )
    formats = options.formats_of(model.names).for_model(require_tokenizer(model).response_template)
    grammar, reasoning, budget = None, None, Budget()
    if body_grammar is not None or choice.is_forced:
        grammar = body_grammar.served(budget) if body_grammar else choice.grammar(budget)
        if body.separate_reasoning:
            reasoning = _reasoning(body, formats, text)
        if reasoning is not None:
            grammar = after_reasoning(grammar, reasoning, require_tokenizer(model).is_special)
    elif choice.has_strict:
        grammar = _strict_calls(model, body, choice, formats, text, budget=budget)
    if body_grammar is not None:
        # The client's grammar constrains the text after the reasoning, which therefore contains no calls.
        formats = ReplyFormats(reasoning=formats.reasoning if reasoning is not None else None)
        choice = ToolChoice([])
    make_reply = _make_reply(chat, choice, formats, text, reasoning)
    if make_reply is not None and not choice.is_forced:
        # The marks of many formats are special tokens, which the parser must see.
        sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
    prompts = Prompts(is_batch=False, texts=[text])
    prompt_options = PromptOptions(sampling, grammar, body.engine_logprobs())
    call = _call(model, body, prompt_options, prompts, id_prefix=id_prefix)
    if choice.is_forced and reasoning is not None:
        # Show only these special tokens: a stop token that the client keeps must not enter the arguments.
        shown = (reasoning.opening, reasoning.closing)
        call.generations = [
            replace(each, rules=replace(each.rules, shown_tokens=shown))
            for each in call.generations
        ]
    call.make_reply, call.has_reasoning = make_reply, body.include_reasoning
    return call


def _strict_calls(
    model: ServedModel,
    body: ChatOptions,
    choice: ToolChoice,
    formats: ReplyFormats,
    prompt: str,
    *,
    budget: Budget,
) -> Grammar:
    """Return the grammar that makes unforced calls, after the reasoning, follow their schemas."""
    call = formats.tools.call if formats.tools is not None else None
    is_special = require_tokenizer(model).is_special
    if call is None or is_special(call[0]):
        raise InvalidRequest(
            "tools: strict requires --tool-call-parser hermes or a tool_choice that forces a call; leave it out"
        )
    grammar = strict_calls(choice.parameters, call, budget, is_parallel=body.parallel_tool_calls)
    reasoning = _reasoning(body, formats, prompt)
    return grammar if reasoning is None else after_reasoning(grammar, reasoning, is_special)


def _reasoning(body: ChatOptions, formats: ReplyFormats, prompt: str) -> ReasoningMarks | None:
    """Return the marks of the reasoning that precedes the grammar. None: the answer has no reasoning."""
    marks, text = formats.reasoning_marks(), prompt.rstrip()
    if marks is None or text.endswith(marks[1]):
        return None
    is_open = text.endswith(marks[0])
    # A template without the switch may open the reasoning although the client disabled it.
    is_off = any(body.chat_template_kwargs.get(name) is False for name in THINKING_SWITCHES)
    return None if is_off and not is_open else ReasoningMarks(*marks, is_open)


def checked_chat(model: ServedModel, data: dict[str, Any]) -> Chat:
    """Check the fields of a chat and return it."""
    body = read_body(ChatBody, model, data, UNSUPPORTED_IN_CHATS)
    if body.continue_final_message:
        if data.get("add_generation_prompt"):
            raise InvalidRequest(
                "continue_final_message: cannot be combined with add_generation_prompt; set that to false"
            )
        body.add_generation_prompt = False
    pairs = zip(body.messages, data["messages"], strict=True)
    messages = [message.for_template(sent) for message, sent in pairs]
    return Chat(body, messages, [as_sent(tool) for tool in data.get("tools") or ()])


def chat_text(model: ServedModel, chat: Chat, choice: ToolChoice | None = None) -> str:
    """Return the prompt text of a chat, rendered by its template."""
    if not chat.messages:  # items and blocks of other APIs may yield no message
        raise InvalidRequest("messages: must have at least 1 entry")
    content = _mark_end(chat.messages[-1]) if chat.options.continue_final_message else None
    text = require_tokenizer(model).render_chat(
        chat.messages,
        (choice or chat.choice).tools or None,
        chat.options.add_generation_prompt,
        chat.options.for_template(),
    )
    return text if content is None else _until_mark(text, content)


# The blank shows whether a template trims the text. Source: `render_jinja_template` of transformers.
_END_MARK, _BLANK = "CONTINUE_FINAL_MESSAGE_TAG", " "


def _mark_end(last: dict[str, Any]) -> str:
    """Mark where the answer continues the last message, and return its content."""
    content = last["content"]
    if last["role"] != "assistant" or content is None:
        raise InvalidRequest(
            "continue_final_message: the last message must be the assistant's and have content"
        )
    last["content"] = content + _END_MARK + _BLANK
    return str(content)


def _until_mark(text: str, content: str) -> str:
    """Return the prompt up to the mark, without the blanks before it if the template trims texts."""
    before, mark, after = text.rpartition(_END_MARK)
    if not mark or content.strip() not in text:
        raise InvalidRequest(
            "continue_final_message: not supported, because this model's template changes the message's text"
        )
    return before if after.startswith(_BLANK) else before.rstrip()


def _make_reply(
    chat: Chat,
    choice: ToolChoice,
    formats: ReplyFormats,
    prompt: str,
    reasoning: ReasoningMarks | None,
) -> Callable[[], Reply] | None:
    first = None
    if formats.tools is not None and formats.tools.has_numbered_calls:
        first = sum(len(message.get("tool_calls", ())) for message in chat.messages)
    if choice.is_forced:
        return partial(choice.reply, first, reasoning)
    return formats.reply(
        prompt,
        choice.tools,
        first,
        is_split=chat.options.separate_reasoning,
        is_parallel=chat.options.parallel_tool_calls,
    )


def read_body(
    kind: type[OpenAIBodyT],
    model: ServedModel,
    data: dict[str, Any],
    also_unsupported: frozenset[str] = frozenset(),
) -> OpenAIBodyT:
    """Check the fields of a body, and that its `model` is served here."""
    refuse_unsupported(data, also=also_unsupported)
    n = data.get("n")
    if data.get("best_of") not in (None, 1 if n is None else n):
        raise InvalidRequest("best_of: must equal n; leave it out")
    body = validate(kind, data)
    model.resolve_adapter(body.model)
    return body


def _texts(model: ServedModel, prompts: Prompts) -> Sequence[str]:
    if prompts.texts:
        return prompts.texts
    tokenizer = require_tokenizer(model)
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts.ids]


def _call(
    model: ServedModel,
    body: CompletionBody | ChatOptions,
    options: PromptOptions,
    prompts: Prompts,
    *,
    id_prefix: str,
) -> OpenAICall:
    ids = prompt_ids(model, prompts, body.add_special_tokens)
    call_id = body.client_id or f"{id_prefix}{new_request_id()}"
    adapter = model.resolve_adapter(body.model)
    generations = create_generations(
        model,
        body,
        prompts,
        ids,
        options=[options] * len(ids),
        request_ids=ids_of(call_id, options.sampling.n * len(ids)),
        adapter=adapter,
    )
    return OpenAICall(
        call_id=call_id,
        model_name=adapter or model.name,
        is_chat=isinstance(body, ChatOptions),
        generations=generations,
        num_prompt_tokens=sum(map(len, ids)),
        echoes=[""] * len(generations),
        is_stream=body.stream,
        usage=body.stream_options,
        has_token_ids=body.return_token_ids,
        has_ids_as_tokens=body.return_tokens_as_token_ids,
        eos_token_ids=model.eos_token_ids,
    )
