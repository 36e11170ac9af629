"""The parts of messages that describe a generation: the request, and what accompanies its tokens.

The messages that carry them are in `messages`, and so are the rules for changing them.
"""

import secrets
import sys
from collections.abc import Mapping
from typing import Annotated, Literal, NewType
from urllib.parse import urlsplit

import msgspec
import xxhash

from tandem.wire.prefixes import scope_name

RequestId = NewType("RequestId", str)
"""Id of a generation in the router and the nodes, the same for all attempts. Its random part makes it unique."""

NUM_ROOMS = 1 << 63

Room = NewType("Room", int)
"""Number under which the two halves of an attempt find each other. Random, 0 ... 2^63-1."""

SentRoom = Annotated[Room, msgspec.Meta(ge=0, le=NUM_ROOMS - 1)]
"""A room as a message field. The bounds are checked because pages store a room as an int64."""

Epoch = NewType("Epoch", int)
"""Id of one life of a process. Random; a message of a different epoch is rejected."""


def new_request_id() -> RequestId:
    """Return a random request id of 24 hexadecimal digits."""
    return RequestId(secrets.token_hex(12))


def new_room() -> Room:
    """Return a random room. Over 63 bits collisions are so rare that nothing handles them."""
    return Room(secrets.randbits(63))


def new_epoch() -> Epoch:
    """Return a random epoch of 63 bits, which fits the signed 64-bit integer of every language."""
    return Epoch(secrets.randbits(63))


# The type does not bound ids; the edge checks those of a client against the vocabulary.
TokenIds = list[int]


GrammarKind = Literal["json_schema", "json_object", "regex", "ebnf", "structural_tag"]
# Limit of a grammar's text. A node compiles no larger one.
MAX_GRAMMAR_BYTES = 256 << 10


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Constraint on the generated text.

    Attributes:
        kind: Kind of `text`; `json_object` allows any JSON object and needs no text.
        text: JSON schema, xgrammar structural tag (as JSON), regular expression or EBNF grammar.
    """

    kind: GrammarKind
    text: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The engine's sampling parameters. Those that only the edge needs (stop strings) stay there.

    Attributes:
        max_new_tokens: Maximum number of generated tokens, at least 1.
        temperature: Softmax temperature; 0: greedy.
        top_k: Number of most likely tokens to sample from; -1: all.
        min_new_tokens: Number of tokens before end-of-sequence and stop ids are allowed.
        stop_token_ids: Ids that end the generation, in addition to the model's end of sequence.
        seed: Key of the counter-based random generator; the counter is the token's index. The edge always
            sets it, so that a replay draws the same tokens. None: prefill chooses one.
        logit_bias: Token id to the bias added to its logit.
        grammar: Constraint on the text; None: no constraint.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    grammar: Grammar | None = None


_MAX = sys.float_info.max  # rejects infinity, which JSON cannot express


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """A model's values for parameters that a request omits. The defaults here are those of the APIs."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=_MAX)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] = -1
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=_MAX)] = 1.0


class LogprobOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Log-probabilities to return with the tokens, before temperature and penalties.

    Attributes:
        num_top: Number of most likely tokens to report in addition to the sampled one.
        prompt_start: First prompt position to report; -1: none. Position 0 has no log-probability.
    """

    num_top: int = 0
    prompt_start: int = -1


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Log-probabilities at one position. Array-like: new fields go at the end.

    Attributes:
        logprob: Log-probability of the token at this position; None at position 0 of a prompt.
        top: (token id, log-probability) of the most likely tokens, in descending order.
    """

    logprob: float | None
    top: list[tuple[int, float]] = []


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One generation inside the cluster: token ids in, token ids out.

    Attributes:
        prompt_ids: Token ids of the prompt, at least one, each below the vocabulary size.
        num_prior_tokens: Number of tokens at the end of `prompt_ids` that an earlier attempt generated.
            The next token has this index.
        cache_salt: Requests share cached prefixes only with requests of the same salt.
        adapter: Id of the LoRA adapter, as nodes report it; empty: the base model.
        priority: Waiting requests of higher priority start first; the running request of lowest priority is
            retracted first.
        group: Name shared by requests with the same prompt. They go to the same pair, which computes the
            prompt once. Empty: no group.
        session: The client's name of the conversation. Not sent to nodes.
        logprobs: Log-probabilities to return; None: none.
        client: Short name derived from the API key, which it does not reveal. Not sent to nodes.
        deadline_s: Seconds after sending until starting is pointless; None: no deadline.
    """

    request_id: RequestId
    prompt_ids: TokenIds
    sampling: SamplingParams
    num_prior_tokens: int = 0
    cache_salt: str = ""
    priority: int = 0
    group: str = ""
    logprobs: LogprobOptions | None = None
    client: str = ""
    deadline_s: float | None = None
    session: str = ""
    adapter: str = ""

    @property
    def prefix_scope(self) -> str:
        """Name of the scope within which requests share cached prefixes."""
        return scope_name(self.cache_salt, self.adapter)


class Phase(msgspec.Struct, frozen=True, array_like=True):
    """One phase of a request's time. Array-like: new fields go at the end.

    Attributes:
        name: Name of the phase; `tandem.frontend.timings` lists all.
        start_s: Seconds from when the reporter received the request until the phase began, by its clock.
        duration_s: Length of the phase in seconds.
        node: URL of the reporting node; empty if it is known from the link, or is the router.
    """

    name: str
    start_s: float
    duration_s: float
    node: str = ""


class Finish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a node's part of a generation ended, as decided by the engine.

    Attributes:
        reason: `handed_off` ends prefill's part only: every page landed and decode continues.
        matched: Stop id that ended the generation, if `reason` is `stop`.
    """

    reason: Literal["stop", "length", "abort", "handed_off"]
    matched: int | None = None


# ── names in the `kv_transfer_params` of vLLM's MooncakeConnector, which its routers send to both halves ──
#
#   router ── GET /query ──▶ prefill: {"0": {"engine_id": "tandem:8998", "worker_addr": {"0": {"0": "10.0.0.1:8998"}}}}
#          ── transfer_id ──▶ prefill
#          ── transfer_id, remote_bootstrap_addr, remote_engine_id ──▶ decode, which connects to that port of that host

_ENGINE_NAME = "tandem"


def query_answer(host: str, bootstrap_port: int) -> dict[str, object]:
    """Return the answer to `GET /query`, as JSON values."""
    workers = {"0": {"0": f"{host}:{bootstrap_port}"}}
    return {"0": {"engine_id": f"{_ENGINE_NAME}:{bootstrap_port}", "worker_addr": workers}}


def room_of_transfer(transfer_id: str) -> Room:
    """Return the room that both halves of a transfer use."""
    return Room(xxhash.xxh3_64_intdigest(transfer_id.encode(errors="replace")) % NUM_ROOMS)


def address_of(params: Mapping[str, object]) -> tuple[str, int] | None:
    """Return host and bootstrap port of prefill, as `GET /query` named them; None if they are invalid."""
    match params:
        case {"remote_bootstrap_addr": str(url), "remote_engine_id": str(engine)}:
            name, _, port = engine.rpartition(":")
            try:
                host = urlsplit(url).hostname
            except ValueError:
                return None
            is_ours = host and name == _ENGINE_NAME and port.isascii() and port.isdigit()
            return (host, int(port)) if host and is_ours else None
        case _:
            return None
