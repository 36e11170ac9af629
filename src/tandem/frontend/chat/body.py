"""Parse HTTP bodies: from bytes to a checked struct.

Errors in a body raise `InvalidRequest`, whose message names the field. This file has the fields that all APIs
share. `frontend/apis/native.py` and `frontend/chat/openai_body.py` add those of each API.
"""

import codecs
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from tandem.frontend.backend import Bootstrap
from tandem.frontend.chat import field_errors
from tandem.frontend.request_ids import RequestIdField
from tandem.frontend.text import json_text
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import NUM_ROOMS, address_of, room_of_transfer

BodyT = TypeVar("BodyT", bound="Body")
T = TypeVar("T")

# One value for all prompts, or a list with one value per prompt. See `Body.per_prompt`.
PerPrompt: TypeAlias = T | list[T | None]

# Far more than any API has. The body is copied for each of its prompts.
MAX_FIELDS = 1000
# Limit of lists, objects and fields together, counted before parsing: 30 MiB of `[]` would take seconds and
# a GB. Brackets and colons inside strings count too; a text with that many exceeds every context.
MAX_PARTS = 500_000

# Unsupported fields of SGLang, vLLM and OpenAI that would change the answer. A request that sets one is
# rejected, because otherwise its answer would be silently wrong. Fields that cannot change the answer, such as
# `user`, are ignored. Unknown names are ignored too, because clients send extras.
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
_OUTPUT = (
    *("audio", "logprob_token_ids", "prompt_logprobs", "token_ids_logprob", "return_entropy"),
    *("return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs"),
    *("return_hidden_states", "return_indexer_topk", "return_input_ids_in_sglext"),
    *("return_output_ids_in_sglext", "return_spec_tokens_details", "sampling_logprobs_mode"),
    *("return_meta_info", "return_prompt_text", "return_prompt_token_ids"),
    *("return_routed_experts", "return_sampling_mask"),
)
# Each unsupported field with a value that has no effect. This value is accepted, as are null, false and empty ones.
UNSUPPORTED: Mapping[str, object] = dict.fromkeys((*_PROMPT, *_CHOICE, *_OUTPUT)) | {
    "beam_width": 1,
    "modalities": ["text"],
    "thinking_token_budget": -1,
}
# Unsupported on these routes; other routes support some of them.
UNSUPPORTED_IN_CHATS = frozenset({"echo", "input_ids", "thinking"})
UNSUPPORTED_IN_INFERENCE = frozenset({"features", "content_parts"})

# Higher priorities leave the queue first. Nodes store 32 bits.
_PRIORITIES = 2**31
Priority = Annotated[int, Meta(ge=-_PRIORITIES, lt=_PRIORITIES)]
# The same limit as for request ids. A salt is a tenant's name or a hash.
CacheSalt = Annotated[str, Meta(max_length=256)]


def without_nulls(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null: a field that is null is absent."""
    return {name: value for name, value in data.items() if value is not None}


class Body(msgspec.Struct):
    """Base of all bodies: strict types; unknown fields are ignored; null means absent."""

    def per_prompt(self, name: str, count: int, *, is_batch: bool) -> list[Any]:
        """Return the value of a `PerPrompt` field for each prompt."""
        value = getattr(self, name)
        if not isinstance(value, list):
            return [value] * count
        if not is_batch or len(value) != count:
            raise InvalidRequest(
                f"{name}: a list must have one entry for each of the {count} prompts"
            )
        [default] = (each.default for each in msgspec.structs.fields(self) if each.name == name)
        return [default if entry is None else entry for entry in value]

    @classmethod
    def names(cls) -> frozenset[str]:
        """Return all names of the fields in JSON."""
        return frozenset(field.encode_name for field in msgspec.structs.fields(cls))


class GenerationBody(Body):
    """Fields that the bodies of all APIs share, except sampling parameters.

    An SGLang-style router adds the `bootstrap_` fields, which locate the other half of the request; vLLM's router adds
    `kv_transfer_params`.
    """

    stream: bool = False
    priority: Priority = 0
    cache_salt: CacheSalt = ""
    extra_key: PerPrompt[CacheSalt] = ""
    lora_path: PerPrompt[str] = ""
    bootstrap_host: PerPrompt[Annotated[str, Meta(min_length=1, max_length=255)]] | None = None
    bootstrap_port: PerPrompt[Annotated[int, Meta(ge=1, le=65535)]] | None = None
    bootstrap_room: PerPrompt[Annotated[int, Meta(ge=0)]] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def bootstraps(self, count: int, *, is_batch: bool, n: int) -> Sequence[Bootstrap | None]:
        """Return the address of the other half of each of a prompt's `n` generations, prompt by prompt.

        A room is for one generation: those of one prompt, and all with a single `bootstrap_room`, use the rooms from
        the given one on. All None: no router chose the pair.
        """
        if self.bootstrap_host is None and self.bootstrap_room is None:
            other = _other_half(self.kv_transfer_params)
            return [
                other and replace(other, room=(other.room + i) % NUM_ROOMS)
                for i in range(count * n)
            ]
        hosts, ports, rooms = (
            self.per_prompt(f"bootstrap_{name}", count, is_batch=is_batch)
            for name in ("host", "port", "room")
        )
        if any(room is not None and room >= 2 * NUM_ROOMS for room in rooms):
            raise InvalidRequest(f"bootstrap_room: must be less than {2 * NUM_ROOMS}")
        for name, column in (("host", hosts), ("room", rooms)):
            if None in column:
                raise InvalidRequest(f"bootstrap_{name}: is missing")
        if not isinstance(self.bootstrap_room, list):
            rooms = [room + i * n for i, room in enumerate(rooms)]
        found = [
            Bootstrap(host, port, (room + i) % NUM_ROOMS)
            for host, port, room in zip(hosts, ports, rooms, strict=True)
            for i in range(n)
        ]
        if len({each.room for each in found}) < len(found):
            raise InvalidRequest("bootstrap_room: the rooms of two generations are equal")
        return found


class ModelBody(GenerationBody):
    """Fields that the bodies of all APIs except `/generate` share."""

    model: str | None = None
    rid: RequestIdField | None = None
    request_id: RequestIdField | None = None

    @property
    def client_id(self) -> str | None:
        """The client's id of the request."""
        return self.request_id if self.rid is None else self.rid

    def shared(self) -> dict[str, Any]:
        """Return the values of these fields, to create `ChatOptions`."""
        return {name: getattr(self, name) for name in ModelBody.__struct_fields__}


def _other_half(params: dict[str, Any] | None) -> Bootstrap | None:
    """Read the other half from the `kv_transfer_params` of MooncakeConnector. None: this node computes the prompt."""
    params = params or {}
    match params:
        case {"transfer_id": str(name), "do_remote_decode": True}:
            return Bootstrap("", None, room_of_transfer(name), is_sequential=True)
        case {"transfer_id": str(name), "do_remote_prefill": True} if address := address_of(params):
            return Bootstrap(*address, room_of_transfer(name))
        case _:
            return None


# SGLang's headers, with the fields of the body that they override. Routers that do not parse bodies send them.
_TEXTS = {"X-Override-Rid": "rid", "X-Override-Bootstrap-Host": "bootstrap_host"}
_PRIORITY_HEADER = "X-Override-Priority"
_NUMBERS = {
    "X-Override-Bootstrap-Port": "bootstrap_port",
    "X-Override-Bootstrap-Room": "bootstrap_room",
    _PRIORITY_HEADER: "priority",
}
_RANKS = ("X-Override-Routed-Dp-Rank", "X-Data-Parallel-Rank")


def max_priority(headers: Mapping[str, str], body: bytes) -> int:
    """Return a priority that a request does not exceed, without parsing its body."""
    may_have_one = b'"priority"' in body or _PRIORITY_HEADER in headers
    return _PRIORITIES - 1 if may_have_one else 0


def with_overrides(headers: Mapping[str, str], data: dict[str, Any]) -> dict[str, Any]:
    """Return the body with the fields that SGLang's headers override.

    Raises:
        InvalidRequest: A text is not valid UTF-8, a number is invalid, or a data-parallel rank is not 0.
    """
    found = {field: _text(name, headers[name]) for name, field in _TEXTS.items() if name in headers}
    numbers = {
        name: _integer(name, headers[name]) for name in (*_NUMBERS, *_RANKS) if name in headers
    }
    for name in _RANKS:
        if numbers.get(name):
            raise InvalidRequest(f"{name}: each node is a single rank; send 0, or no header")
    return (
        data
        | found
        | {_NUMBERS[name]: value for name, value in numbers.items() if name in _NUMBERS}
    )


def _text(name: str, text: str) -> str:
    # aiohttp replaces bytes that are not valid UTF-8 by surrogates.
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise InvalidRequest(f"{name}: must be valid UTF-8")
    return text


def _integer(name: str, text: str) -> int:
    if not (text.isascii() and text.removeprefix("-").isdigit() and len(text) <= _MAX_DIGITS):
        raise InvalidRequest(f"{name}: must be an integer")
    return int(text)


# More than those of 2^64.
_MAX_DIGITS = 25
# Headers of vLLM's and SGLang's routers that name a session. The first one present is used.
_SESSION_HEADERS = ("X-Session-Id", "X-SMG-Routing-Key")
# Our field, then OpenAI's current field, then the field that it replaced.
_SESSION_FIELDS = ("session_id", "prompt_cache_key", "user")
# The same limit as for request ids. Longer names are truncated.
_MAX_SESSION_CHARS = 256


def session_of(headers: Mapping[str, str], data: Mapping[str, object]) -> str:
    """Return the session that a request names, or empty. It is a routing hint, so invalid values are ignored."""
    metadata = data.get("metadata")  # Anthropic's field
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    candidates = [*map(headers.get, _SESSION_HEADERS), *map(data.get, _SESSION_FIELDS), user]
    for value in candidates:
        if isinstance(value, str) and value:
            # A header may contain bytes that are not valid text.
            return value[:_MAX_SESSION_CHARS].encode(errors="replace").decode()
    return ""


def read_json(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`."""
    data = data.removeprefix(codecs.BOM_UTF8)
    if not data.strip():
        raise InvalidRequest("the body is empty; send a JSON object")
    if len(data) > MAX_PARTS and sum(map(data.count, (b"{", b"[", b":"))) > MAX_PARTS:
        raise InvalidRequest(
            f"the body has more than {MAX_PARTS} lists, objects and fields; send a smaller one"
        )
    try:
        value = json_text.decode(data)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    if len(value) > MAX_FIELDS:
        raise InvalidRequest(f"the body has {len(value)} fields; at most {MAX_FIELDS} are allowed")
    return value


def validate(body_class: type[BodyT], data: Mapping[str, object], prefix: str = "") -> BodyT:
    """Validate `data` as a body of this class.

    Args:
        prefix: Prefix of field names in errors, such as `sampling_params`.
    """
    if None in data.values():
        data = without_nulls(data)
    try:
        try:
            return msgspec.convert(data, body_class, str_keys=True)
        except msgspec.ValidationError as error:
            if "got `null`" not in str(error):
                raise
            data = field_errors.without_nulls(body_class, data)
            return msgspec.convert(data, body_class, str_keys=True)
    except msgspec.ValidationError as error:
        sentence = field_errors.sentence(error, body_class, data, prefix)
        raise InvalidRequest(sentence) from error


def refuse_unsupported(
    data: Mapping[str, object], prefix: str = "", also: frozenset[str] = frozenset()
) -> None:
    """Reject unsupported fields.

    Args:
        prefix: Prefix of field names in errors, such as `sampling_params.`.
        also: Additional unsupported names.

    Raises:
        InvalidRequest: An unsupported field has a value that would take effect.
    """
    for name, value in data.items():
        is_unsupported = name in UNSUPPORTED or name in also
        if is_unsupported and value != UNSUPPORTED.get(name) and has_effect(value):
            raise InvalidRequest(f"{prefix}{name}: not supported here; leave it out")


def refuse_unknown(params: Mapping[str, object], known: Set[str]) -> None:
    """Reject unknown names in `sampling_params`, because most are misspelled."""
    for name, value in params.items():
        if value is not None and name not in known and name not in UNSUPPORTED:
            raise InvalidRequest(
                f"sampling_params.{name[: field_errors.MAX_NAME_CHARS]}: unknown sampling parameter; "
                "check its spelling or leave it out"
            )


def has_effect(value: object) -> bool:
    """Return whether a value can take effect. Null, false, empty values and lists of these cannot."""
    if isinstance(value, list):
        return any(map(has_effect, value))
    return value is not None and value is not False and value not in ("", {})
