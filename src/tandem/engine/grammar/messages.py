"""Messages between the engine and a grammar process, which stay on one machine and in one release."""

import msgspec

from tandem.wire.errors import ErrorInfo
from tandem.wire.generation import Grammar

TOO_COMPLEX = (
    "the grammar takes too much time or memory; use fewer or smaller repetition bounds (maxLength, maxItems, {m,n}) "
    "and enums, and avoid nested repetition and alternatives that match the same text"
)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a grammar process. The kernel ends a process that exceeds one.

    Attributes:
        start_s: Wall time until the host has started and forked the process. A start takes some seconds.
        wait_s: Wall time in the queue for compilation. It exceeds `compile_s`, so that grammars that compile for ever
            delay others and do not fail them.
        compile_s: CPU time of the compilation.
        masks_s: Wall time of the masks of one message. A machine with too few cores may pause a process for a second.
        cpu_s, cpu_per_token_s: CPU time that masks may take: `cpu_s` at once, and `cpu_per_token_s` for each token on
            average. Masks of ordinary grammars take 0.05 ms.
        memory_bytes: Memory beyond the shared vocabulary. The largest of a few dozen real schemas took 21 MB.
    """

    start_s: float = 60.0
    wait_s: float = 20.0
    compile_s: float = 10.0
    masks_s: float = 5.0
    cpu_s: float = 5.0
    cpu_per_token_s: float = 0.02
    memory_bytes: int = 1 << 30


class Compile(msgspec.Struct, frozen=True):
    """To the process, first: compile this grammar. The answer is an empty `Masks` or `Ended`."""

    grammar: Grammar
    limits: Limits


class Work(msgspec.Struct, frozen=True):
    """To the process: advance answers and fill their masks. The answer is `Masks` or `Ended`.

    Attributes:
        token_ids: Tokens to accept, by answer. An unknown number begins an answer.
        answers: Answers to keep. All others have ended.
    """

    token_ids: dict[int, list[int]]
    answers: frozenset[int]


class Masks(msgspec.Struct, frozen=True, tag=True):
    """The masks after `Work`.

    Attributes:
        rows: Allowed tokens by answer, in xgrammar's format: an int32 for each 32 tokens.
        violations: Token and index of the first token that the grammar does not allow, by answer.
    """

    rows: dict[int, bytes] = {}
    violations: dict[int, tuple[int, int]] = {}


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The end of the process. The process sends it, or its host if a signal ended the process.

    Attributes:
        cause: What to log; empty if the grammar was refused or reached a limit, or if the process has logged the cause.
    """

    error: ErrorInfo
    cause: str = ""
