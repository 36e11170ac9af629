"""What the command and its client processes tell each other. Times are of the machine's monotonic clock."""

import struct
from array import array
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

Api = Literal["native", "completions", "chat"]

# Before each message on a pipe: its size.
FRAME = struct.Struct("!I")


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """What is driven, and how.

    Attributes:
        model: Asked for over OpenAI's APIs.
        is_eos_ignored: Every answer is as long as it was asked to be; a shorter one has failed.
        extra_body: Fields that every request gets besides.
        timeout_s: A request that hears nothing for so long has failed.
    """

    url: str
    api: Api
    model: str = ""
    api_key: str = ""
    is_eos_ignored: bool = True
    extra_body: dict[str, object] = {}
    timeout_s: float = 300.0


class PromptRules(msgspec.Struct, frozen=True, kw_only=True):
    """What prompts are made of; see `prompts.py`."""

    vocab_size: int
    seed: int = 0
    shared_prefix_tokens: int = 0


class Turn(msgspec.Struct, frozen=True):
    """What one request adds to its conversation, and what it asks for, in tokens."""

    input_tokens: int
    output_tokens: int


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation; most are of one turn.

    Attributes:
        index: Unique in a run: prompts are made from it.
        due_s: When it is sent, after the start of the load.
        prefix: Which of the shared prefixes its first prompt begins with.
        block_ids: Of a trace: equal ids stand for equal blocks of the prompt.
    """

    index: int
    turns: list[Turn]
    due_s: float = 0.0
    prefix: int = 0
    block_ids: list[int] = []


class ClientPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one client process does.

    Attributes:
        concurrency: Conversations under way at once, at most; 0: as many as are due.
        think_time_s: Between an answer and the next turn.
    """

    server: Server
    rules: PromptRules
    jobs: list[Job]
    concurrency: int = 0
    think_time_s: float = 0.0


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request: when it was sent, and when how many of its tokens had arrived.

    Attributes:
        due_s: When it was to be sent, and there was a place for it; later than that the client sent it.
        arrival_s: Of everything that brought tokens, in seconds after `sent_s`, as float64.
        arrival_tokens: Tokens that had arrived by then, all in all, as uint32.
        output_tokens: Of the whole answer, as the server counts them.
        prompt_tokens: As the server counts them; as asked where it does not say.
        failure: The kind; empty for a request that ended well, `unfinished` for one that was stopped.
        error: In words.
    """

    due_s: float
    sent_s: float
    arrival_s: bytes = b""
    arrival_tokens: bytes = b""
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failure: str = ""
    error: str = ""

    def times(self) -> NDArray[np.float64]:
        """Return `arrival_s` as an array."""
        return np.frombuffer(self.arrival_s, np.float64)

    def counts(self) -> NDArray[np.int64]:
        """Return `arrival_tokens` as an array that can be subtracted."""
        return np.frombuffer(self.arrival_tokens, np.uint32).astype(np.int64)


UNFINISHED = "unfinished"


def packed(arrivals: Sequence[tuple[float, int]]) -> dict[str, bytes]:
    """Return (seconds after sending, tokens so far) as the two fields of a `Sample`."""
    return {
        "arrival_s": array("d", [at_s for at_s, _ in arrivals]).tobytes(),
        "arrival_tokens": array("I", [count for _, count in arrivals]).tobytes(),
    }


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A client has its plan and waits for the start."""


class Go(msgspec.Struct, frozen=True):
    """The start of the load, for all clients; the end of their standard input stops them."""

    start_s: float


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a client did since it last told.

    Attributes:
        num_running: Requests under way now.
        first_token_s: Times to first token.
        gap_s: Sum of the times between tokens, of which there were `num_gaps`.
    """

    num_running: int
    num_tokens: int = 0
    first_token_s: list[float] = []
    gap_s: float = 0.0
    num_gaps: int = 0
    samples: list[Sample] = []


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last word of a client: the processor time that the load took it."""

    cpu_s: float


FromClient = Ready | Progress | Finished
