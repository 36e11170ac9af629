"""Bodies of HTTP requests: bytes to a checked pydantic model.

Whatever reads a body in this room raises `InvalidRequest`, whose sentence names the field. Here is what
the bodies of both APIs share. Their own fields are in `frontend/native.py` and `frontend/openai_body.py`.
"""

from collections.abc import Callable, Mapping, Set
from typing import Annotated, Any, TypeAlias, TypeVar

import pydantic_core
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    ValidationError,
    WrapValidator,
    model_validator,
)

from tandem.frontend.backend import Bootstrap
from tandem.wire.errors import InvalidRequest

BodyT = TypeVar("BodyT", bound="Body")
T = TypeVar("T")


class _AtFirstError(FailFast):
    """As `FailFast`, and hashable, which unions ask of their members."""

    __hash__ = object.__hash__


# The list is rejected at its first wrong entry: naming all of a million takes many seconds.
Many: TypeAlias = Annotated[list[T], _AtFirstError()]

_ONE, _LIST = "(one)", "(list)"
# One value for all prompts, or a list with one for each. See `Body.per_prompt`.
PerPrompt: TypeAlias = Annotated[
    Annotated[T, Tag(_ONE)] | Annotated[Many[T | None], Tag(_LIST)],
    Discriminator(lambda value: _LIST if isinstance(value, list) else _ONE),
]


def worded(sentence: str) -> WrapValidator:
    """Report every error of the annotated type by this sentence."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        if value == []:
            raise ValueError("must not be empty")
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(sentence) from None

    return WrapValidator(check)


# Many times what any API has. A body is copied for each of its prompts.
MAX_FIELDS = 1000
# Lists, objects and fields together, counted before parsing: 30 MiB of `[]` would take seconds and a
# GB. Brackets and colons within texts count too: no context holds a text with so many.
MAX_PARTS = 500_000

# Characters of an unknown name that an error repeats.
_MAX_NAME_CHARS = 64

# Pydantic's error types in the words of the API.
_SENTENCES = {
    "missing": "is missing",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "literal_error": "must be {expected}",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "union_tag_invalid": "{discriminator} {tag!r} is not supported here, only {expected_tags}",
    "union_tag_not_found": "must be an object with {discriminator}",
}

# Fields of SGLang, vLLM and OpenAI that would change the answer and are not supported here. A request that
# sets one is rejected: otherwise its answer would be wrong, and nobody would notice. Fields that cannot change
# the answer, such as `user`, are ignored. So are names that none of them has: clients send extras.
_PROMPT = (
    *("audio_data", "image_data", "video_data", "input_embeds", "positional_embed_overrides"),
    *("prompt_embeds", "multi_item_delimiter_indices", "truncate_prompt_tokens", "suffix"),
    *("chat_template", "documents", "functions", "session_params"),
    *("reasoning", "task", "web_search_options", "lora_id", "token_indices_to_pool"),
)
_CHOICE = (
    *("allowed_token_ids", "bad_words", "custom_logit_processor", "custom_params"),
    *("logits_processors", "watermark", "watermarking", "vllm_xargs"),
    *("guided_whitespace_pattern", "moderation", "use_beam_search", "max_thinking_tokens"),
    "repetition_detection",
)
_TOLD = (
    *("audio", "logprob_token_ids", "prompt_logprobs", "token_ids_logprob", "return_entropy"),
    *("return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs"),
    *("return_hidden_states", "return_indexer_topk", "return_input_ids_in_sglext"),
    *("return_output_ids_in_sglext", "return_spec_tokens_details", "sampling_logprobs_mode"),
    *("return_meta_info", "return_prompt_text", "return_prompt_token_ids"),
    *("return_routed_experts", "return_sampling_mask"),
)
# Each with the value by which it asks for nothing, beside null, false and empty.
UNSUPPORTED: Mapping[str, object] = dict.fromkeys((*_PROMPT, *_CHOICE, *_TOLD)) | {
    "beam_width": 1,
    "modalities": ["text"],
    "thinking_token_budget": -1,
}
# On one route each. Some are supported on others.
UNSUPPORTED_IN_CHATS = frozenset({"echo", "input_ids", "thinking"})
UNSUPPORTED_IN_INFERENCE = frozenset({"features", "content_parts"})

# Higher ones leave the queue first. Nodes compare 32 bits.
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]
# As long as a request id: a salt is a tenant's name or a hash.
CacheSalt = Annotated[str, Field(max_length=256)]


class Body(BaseModel):
    """Base of all bodies: strict types, unknown fields ignored, null the same as absent."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}

    def per_prompt(self, name: str, count: int, *, is_batch: bool) -> list[Any]:
        """Return a `PerPrompt` field's value for each prompt."""
        value, default = getattr(self, name), type(self).model_fields[name].default
        if not isinstance(value, list):
            return [value] * count
        if not is_batch or len(value) != count:
            raise InvalidRequest(f"{name}: must have one entry for each of {count} prompts")
        return [default if entry is None else entry for entry in value]

    @classmethod
    def names(cls) -> frozenset[str]:
        """Return the names by which clients may send its fields."""
        found: set[str] = set()
        for name, field in cls.model_fields.items():
            match field.validation_alias:
                case AliasChoices(choices=choices):
                    found.update(map(str, choices))
                case alias:
                    found.add(name if alias is None else str(alias))
        return frozenset(found)


class GenerationBody(Body):
    """What bodies of both APIs share, without sampling parameters.

    A router of SGLang's kind may have added where the other half of a request is.
    """

    stream: bool = False
    priority: Priority = 0
    cache_salt: CacheSalt = ""
    lora_path: PerPrompt[str] = ""
    bootstrap_host: PerPrompt[Annotated[str, Field(min_length=1, max_length=255)]] | None = None
    bootstrap_port: PerPrompt[Annotated[int, Field(ge=1, le=65535)]] | None = None
    bootstrap_room: PerPrompt[Annotated[int, Field(ge=0, lt=2**63)]] | None = None

    def bootstraps(self, count: int, *, is_batch: bool, n: int) -> list[Bootstrap | None]:
        """Return where the other half of each prompt is. All None when no router chose.

        Args:
            n: Generations of each prompt. Must be 1 where a router chose: a room is for one.
        """
        if self.bootstrap_host is None and self.bootstrap_room is None:
            return [None] * count
        hosts, ports, rooms = (
            self.per_prompt(f"bootstrap_{name}", count, is_batch=is_batch)
            for name in ("host", "port", "room")
        )
        for name, column in (("host", hosts), ("room", rooms)):
            if None in column:
                raise InvalidRequest(f"bootstrap_{name}: is missing")
        if len(set(rooms)) < count or n > 1:
            raise InvalidRequest(
                "bootstrap_room: each generation needs a room of its own, and n is 1"
            )
        return [Bootstrap(*half) for half in zip(hosts, ports, rooms, strict=True)]


# Headers of vLLM's and SGLang's routers that name a session. The first that is there counts.
_SESSION_HEADERS = ("X-Session-Id", "X-SMG-Routing-Key")
# Ours, then OpenAI's field for this, then the one that it replaced.
_SESSION_FIELDS = ("session_id", "prompt_cache_key", "user")
# As long as a request id. Longer names are told apart by their beginning.
_MAX_SESSION_CHARS = 256


def session_of(headers: Mapping[str, str], data: Mapping[str, object]) -> str:
    """Return the session that a request names, or empty. It is a hint: nothing is rejected."""
    metadata = data.get("metadata")  # of Anthropic's API
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    named = [*map(headers.get, _SESSION_HEADERS), *map(data.get, _SESSION_FIELDS), user]
    for value in named:
        if isinstance(value, str) and value:
            # A header may have bytes that are no text.
            return value[:_MAX_SESSION_CHARS].encode(errors="replace").decode()
    return ""


def read_json(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`. NaN and infinities are read, to be rejected by field."""
    if not data.strip():
        raise InvalidRequest("the body is empty; send a JSON object")
    if len(data) > MAX_PARTS and sum(map(data.count, (b"{", b"[", b":"))) > MAX_PARTS:
        raise InvalidRequest(f"the body has more than {MAX_PARTS} lists, objects and fields")
    try:
        value = pydantic_core.from_json(data)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    if len(value) > MAX_FIELDS:
        raise InvalidRequest(f"the body has {len(value)} fields; at most {MAX_FIELDS} may be")
    return value


def validate(body_class: type[BodyT], data: Mapping[str, object], prefix: str = "") -> BodyT:
    """Return `data` as a body.

    Args:
        prefix: Put before the field's name in an error, such as `sampling_params`.
    """
    try:
        return body_class.model_validate(data)
    except ValidationError as error:
        raise InvalidRequest(_sentence(error, prefix)) from error


def _sentence(error: ValidationError, prefix: str) -> str:
    """Name the first wrong field and what it must be."""
    first = error.errors(include_url=False)[0]
    loc = (part for part in (prefix, *first["loc"]) if part not in ("", _ONE, _LIST))
    field = ".".join(map(str, loc))
    template = _SENTENCES.get(first["type"])
    sentence = template.format(**first.get("ctx", {})) if template else first["msg"]
    return f"{field}: {sentence.removeprefix('Value error, ')}" if field else sentence


def refuse_unsupported(
    data: Mapping[str, object], prefix: str = "", also: frozenset[str] = frozenset()
) -> None:
    """Reject unsupported fields.

    Args:
        prefix: Put before the field's name in an error, such as `sampling_params.`.
        also: More names that are not supported.

    Raises:
        InvalidRequest: A field asks for something unsupported.
    """
    for name, value in data.items():
        is_unsupported = name in UNSUPPORTED or name in also
        if is_unsupported and value != UNSUPPORTED.get(name) and asks(value):
            raise InvalidRequest(f"{prefix}{name}: not supported here; leave it out")


def refuse_unknown(params: Mapping[str, object], known: Set[str]) -> None:
    """Reject a name in `sampling_params` that is no sampling parameter: most are misspelt."""
    for name, value in params.items():
        if value is not None and name not in known and name not in UNSUPPORTED:
            raise InvalidRequest(
                f"sampling_params.{name[:_MAX_NAME_CHARS]}: is no sampling parameter"
            )


def asks(value: object) -> bool:
    """Return whether a value asks for anything. Null, false, empty values and lists of these do not."""
    if isinstance(value, list):
        return any(map(asks, value))
    return value is not None and value is not False and value not in ("", {})
