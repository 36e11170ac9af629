"""The interface between the role and vLLM's engine, so that the role does not import vLLM."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.vllm.hand_offs import WorkerReports
from tandem.wire.errors import InvalidRequest, TandemError
from tandem.wire.generation import Finish, GenerateRequest, TokenLogprobs
from tandem.wire.messages import ChangeAdapter, LoadedAdapter, ModelInfo, TierLoad


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The output of one step for one request.

    Attributes:
        cached_tokens: Prompt tokens that were in the prefix cache; set in the first output only.
        finish: None while the request runs.
        error: Why vLLM failed the request; empty otherwise.
        prompt_logprobs: Log-probabilities of the prompt tokens from index 1 on.
    """

    request_id: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    cached_tokens: int = 0
    finish: Finish | None = None
    error: str = ""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Current numbers of requests and blocks; bytes moved since the start.

    Attributes:
        max_running: Maximum number of running requests; 0: not reported.
        ending_s: See `NodeLoad`; 0 if vLLM runs its ranks in other processes.
    """

    num_running: int = 0
    num_waiting: int = 0
    max_running: int = 0
    num_pages: int = 0
    pages_free: int = 0
    page_size: int = 0
    moved_bytes: int = 0
    ending_s: float = 0.0
    tiers: Sequence[TierLoad] = ()


@dataclass(frozen=True, slots=True)
class HandOffParams:
    """How this half of a request meets the other one. `bootstrap_*` only on decode.

    Attributes:
        waits_for_grant: As in `StartPrefill`.
    """

    room: int
    bootstrap_host: str = ""
    bootstrap_port: int = 0
    waits_for_grant: bool = True

    @property
    def is_decode(self) -> bool:
        """Whether this half decodes."""
        return bool(self.bootstrap_host)

    def params(self) -> dict[str, object]:
        """Return the request's `kv_transfer_params`."""
        params: dict[str, object] = {
            "bootstrap_room": self.room,
            "draws_first": True,
            "waits_for_grant": self.waits_for_grant,
        }
        if self.bootstrap_host:
            params |= {
                "bootstrap_host": self.bootstrap_host,
                "bootstrap_port": self.bootstrap_port,
            }
        return params


class AdapterStore(Protocol):
    """The LoRA adapters of a node."""

    def loaded(self) -> list[LoadedAdapter]:
        """Return the adapters that requests may name, in the order of loading."""

    def change(self, change: ChangeAdapter, answer: Callable[[str | TandemError], None]) -> None:
        """Load or unload an adapter; see `RequestRunner.change_adapter`."""

    def poll(self) -> None:
        """Continue the changes."""


class NoAdapters:
    """The adapters of an engine that serves its base model only. Implements `AdapterStore`."""

    def loaded(self) -> list[LoadedAdapter]:
        """Return an empty list."""
        return []

    def change(self, _change: ChangeAdapter, _answer: Callable[[str | TandemError], None]) -> None:
        """Raise `InvalidRequest`."""
        raise InvalidRequest("this engine serves its base model only")

    def poll(self) -> None:
        """Do nothing."""


class Generator(Protocol):
    """The part of vLLM's engine that the role uses."""

    @property
    def adapters(self) -> AdapterStore:
        """The LoRA adapters."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""

    def meet(self) -> None:
        """Agree with the other ranks of a data-parallel group whether the next step runs."""

    def check(self, request: GenerateRequest, hand_off: HandOffParams | None) -> object:
        """Convert a request for `add`, or raise `InvalidRequest` or `NoNodeAvailable`."""

    def add(self, request_id: str, checked: object) -> None:
        """Queue a checked request under a unique id."""

    def abort(self, request_id: str) -> None:
        """Abort a request; an unknown id is ignored."""

    def land(self, request_id: str, first_id: int) -> Finish | None:
        """Give a landed request its first token; return how it ends the answer, or raise `EngineFailed`."""

    def step(self) -> list[StepOutput]:
        """Run one step."""

    def take_transfers(self) -> WorkerReports:
        """Return the transfers that ended since the last call: `handed_off`, `failed` and `landed`."""

    def counts(self) -> EngineCounts:
        """Return the current counts."""

    def flush_cache(self) -> None:
        """Drop the cached blocks that no request reads."""

    @property
    def model(self) -> ModelInfo:
        """The model."""
