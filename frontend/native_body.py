"""Bodies of the native API: from JSON to checked generations.

```
 body ──▶ GenerateBody ──▶ prompts, sampling, n ──▶ a Generation for each
```

Leaves out answering, which is in `frontend/generate.py`.
"""

import difflib
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import Field

from tandem.frontend.backend import ServedModel
from tandem.frontend.batch_fields import (
    Booleans,
    BootstrappedBody,
    Ids,
    Integers,
    Objects,
    Strings,
    bootstraps,
    rows,
)
from tandem.frontend.body import Body, CacheSalt, Priority, validate
from tandem.frontend.edge import part_id
from tandem.frontend.generation import Generation, Prompt, Wishes, generations_of
from tandem.frontend.grammars import NATIVE_NAMES, native_grammar
from tandem.frontend.logprobs import MAX_TOP_LOGPROBS
from tandem.frontend.prompts import MAX_GENERATIONS, Prompts, id_prompts, prompt_ids, text_prompts
from tandem.frontend.sampling import (
    MAX_STOP_PATTERNS,
    NativeSampling,
    read_sampling,
    require_tokens,
)
from tandem.frontend.session import session_of
from tandem.frontend.unsupported import UNSUPPORTED, refuse_unsupported
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import LogprobsWanted
from tandem.wire.ids import RequestId, new_request_id

_MAX_ID_CHARS = 256

_PARAMETERS = NativeSampling.names() | NATIVE_NAMES
# SGLang has it for tokenizers that are not those of the `tokenizers` library.
_WITHOUT_EFFECT = frozenset({"spaces_between_special_tokens"})
# Of a name that a client made up, in an error.
_MAX_NAME_CHARS = 64

T = TypeVar("T")


class GenerateBody(BootstrappedBody):
    """`/generate`, but for sampling parameters, which may also stand at the top level."""

    text: Strings = None
    input_ids: Ids = None
    sampling_params: Objects = None
    rid: Strings = None
    stream: bool = False
    priority: Priority = 0
    cache_salt: CacheSalt = ""
    return_logprob: Booleans = None
    logprob_start_len: Integers = None
    top_logprobs_num: Integers = None
    return_text_in_logprobs: bool = False

    def prompts(self) -> Prompts:
        """Return the prompts.

        Raises:
            InvalidRequest: There are none, or both text and ids.
        """
        if self.text is not None and self.input_ids is not None:
            raise InvalidRequest("send either text or input_ids, not both")
        if self.text is not None:
            return text_prompts(self.text, "text")
        if self.input_ids is not None:
            return id_prompts(self.input_ids, "input_ids")
        raise InvalidRequest("there is no prompt: send text or input_ids")


class LogprobBody(Body):
    """What is asked of one prompt's log-probabilities; a start of -1 tells of the output only."""

    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1)] = -1
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0

    def wanted(self, num_prompt_tokens: int) -> LogprobsWanted | None:
        """Return what the engine is asked for.

        Raises:
            InvalidRequest: The start is behind the prompt.
        """
        if not self.return_logprob:
            return None
        start = self.logprob_start_len
        if start > num_prompt_tokens:
            raise InvalidRequest(
                f"logprob_start_len: {start} is behind the prompt of {num_prompt_tokens} tokens"
            )
        return LogprobsWanted(
            num_top=self.top_logprobs_num, prompt_start=-1 if start == num_prompt_tokens else start
        )


@dataclass(frozen=True, slots=True)
class NativeCall:
    """One checked call of `/generate`.

    Attributes:
        is_list: Whether it is answered by a list.
        has_text_in_logprobs: Whether log-probabilities tell the text of their tokens.
    """

    generations: list[Generation]
    is_list: bool
    is_stream: bool
    has_text_in_logprobs: bool = False


def read_call(model: ServedModel, data: dict[str, Any]) -> NativeCall:
    """Check a body and make its generations: n for each prompt, in order.

    Raises:
        InvalidRequest: Something in it cannot be; the sentence names it.
    """
    refuse_unsupported(data)
    body = validate(GenerateBody, data)
    prompts = body.prompts()
    fields, prefix = _sampling_fields(data, body, len(prompts))
    samplings = _each(
        [read_sampling(NativeSampling, part, model, prefix) for part in fields], len(prompts)
    )
    grammars = _each([native_grammar(part) for part in fields], len(prompts))
    logprobs = rows(LogprobBody, body, len(prompts), is_batch=prompts.is_batch)
    n = samplings[0].n
    halves = bootstraps(body, len(prompts), is_batch=prompts.is_batch, n=n)
    _check_counts(samplings)
    _check_patterns(samplings)
    generations: list[Generation] = []
    rids = _request_ids(body.rid, len(prompts), n)
    for index, ids in enumerate(prompt_ids(model, prompts)):
        if not logprobs[index].return_logprob:
            require_tokens(samplings[index], "max_new_tokens")
        wishes = Wishes(
            body.priority,
            body.cache_salt,
            logprobs[index].wanted(len(ids)),
            grammars[index],
            session_of(data),
        )
        names = rids[index * n : (index + 1) * n]
        prompt = Prompt(ids, names, wishes, halves[index])
        generations += generations_of(model, prompt, samplings[index])
    return NativeCall(
        generations,
        is_list=prompts.is_batch or n > 1,
        is_stream=body.stream,
        has_text_in_logprobs=body.return_text_in_logprobs,
    )


def _sampling_fields(
    data: dict[str, Any], body: GenerateBody, count: int
) -> tuple[list[dict[str, Any]], str]:
    """Return the parameters of each prompt, or one for all, and how errors call them.

    Those in `sampling_params` win over the top level.
    """
    given = body.sampling_params
    parts = given if isinstance(given, list) else [given or {}]
    if len(parts) not in {1, count} or not all(isinstance(part, dict) for part in parts):
        raise InvalidRequest(
            f"sampling_params: must be an object, or a list with one for each of {count} prompts"
        )
    for part in parts:
        refuse_unsupported(part, "sampling_params.")
        _check_names(part)
    return [data | part for part in parts], "sampling_params" if given else ""


def _check_names(params: dict[str, Any]) -> None:
    """Refuse a name that is no sampling parameter, as SGLang does: most are misspelt."""
    for name, value in params.items():
        if value is None or name in _PARAMETERS or name in _WITHOUT_EFFECT or name in UNSUPPORTED:
            continue
        shown = name[:_MAX_NAME_CHARS]
        near = difflib.get_close_matches(shown, _PARAMETERS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InvalidRequest(f"sampling_params.{shown}: is no sampling parameter{hint}")


def _each(parts: list[T], count: int) -> list[T]:
    return parts * count if len(parts) == 1 else parts


def _check_counts(samplings: list[NativeSampling]) -> None:
    n = samplings[0].n
    if any(sampling.n != n for sampling in samplings):
        raise InvalidRequest("sampling_params.n: must be the same for all prompts")
    if n * len(samplings) > MAX_GENERATIONS:
        raise InvalidRequest(f"prompts times n must be at most {MAX_GENERATIONS}")


def _check_patterns(samplings: list[NativeSampling]) -> None:
    different = {id(sampling): len(sampling.stop_regex) for sampling in samplings}
    if sum(different.values()) > MAX_STOP_PATTERNS:
        raise InvalidRequest(
            f"stop_regex: all prompts together may have {MAX_STOP_PATTERNS}; patterns that hold "
            "for each prompt may be sent once, with sampling_params an object"
        )


def _request_ids(rid: object, count: int, n: int) -> list[RequestId]:
    """Return an id for each generation: the client's own, with a number where it has several."""
    if rid is None:
        return [new_request_id() for _ in range(count * n)]
    names: list[Any] = rid if isinstance(rid, list) else [rid]
    if len(names) not in {1, count} or not all(map(_is_request_id, names)):
        raise InvalidRequest(
            f"rid: must be a string of 1 to {_MAX_ID_CHARS} characters, or one for each prompt"
        )
    per_name = count * n // len(names)
    if per_name == 1:
        ids = [RequestId(name) for name in names]
    else:
        ids = [part_id(name, index) for name in names for index in range(per_name)]
    if len(set(ids)) < len(ids):
        raise InvalidRequest("rid: must be different for each prompt")
    return ids


def _is_request_id(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_ID_CHARS
