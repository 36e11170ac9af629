"""Token ids for planned prompts: equal where their blocks are, and nowhere else. Pure.

All tokens of a block have one id, which is the block's; so have those of a prompt that are its own. Only
which prompts begin alike counts in a plan.
"""

from collections.abc import Sequence

from tandem.plan.seam import BLOCK_TOKENS, PlannedRequest
from tandem.wire.generation import GenerateRequest, SamplingParams
from tandem.wire.ids import RequestId

# 0 is what answers are made of.
_FIRST_ID = 1


class Prompts:
    """Prompts of one load."""

    def __init__(self, requests: Sequence[PlannedRequest]) -> None:
        blocks = {block for request in requests for block in request.blocks}
        self._ids = {block: _FIRST_ID + index for index, block in enumerate(sorted(blocks))}
        self.vocab_size = _FIRST_ID + len(blocks) + len(requests)

    def request(self, planned: PlannedRequest, request_id: RequestId) -> GenerateRequest:
        """Return a request as nodes are given it.

        Args:
            request_id: Its number in the load, as text.
        """
        token_ids: list[int] = []
        for block in planned.blocks[: planned.num_prompt // BLOCK_TOKENS]:
            token_ids += [self._ids[block]] * BLOCK_TOKENS
        own = self.vocab_size - 1 - int(request_id)
        token_ids += [own] * (planned.num_prompt - len(token_ids))
        sampling = SamplingParams(
            max_new_tokens=planned.num_output, temperature=0, ignore_eos=True, seed=0
        )
        return GenerateRequest(
            request_id=request_id, prompt_ids=token_ids, sampling=sampling, session=planned.session
        )
