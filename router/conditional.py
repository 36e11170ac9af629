"""Which prompts a decode node computes by itself, without a prefill node and a transfer. Pure.

A prompt of which decode has little to compute is sooner done there: beside its answers, with no word to
another node. At the gate it waits for room as any other: nodes are chosen behind it. What that costs is the time of the answers beside it, so
there is a bound on what waits at a decode node, and beyond it prompts go to prefill as ever.
"""

from dataclasses import replace

from tandem.router.policy import ClusterSnapshot, NodeSnapshot
from tandem.wire.generation import GenerateRequest


def tokens_to_compute(request: GenerateRequest, num_cached: int = 0) -> int:
    """Return how many tokens of a prompt a decode node has to compute by itself.

    Args:
        num_cached: Of the prompt, the node has so many in its prefix cache.
    """
    wanted = request.logprobs
    if wanted is not None and wanted.prompt_start >= 0:
        # Log-probabilities come from computing, so from there on nothing is taken from the cache.
        num_cached = min(num_cached, max(0, wanted.prompt_start - 1))
    # The last token is always computed: its logits give the next one.
    return max(1, len(request.prompt_ids) - num_cached)


def stays_on_decode(
    request: GenerateRequest, decode: NodeSnapshot, threshold: int, num_cached: int = 0
) -> bool:
    """Tell whether a decode node shall compute a prompt by itself.

    Args:
        threshold: Prompt tokens that the node may have to compute at a time, this prompt's included.
        num_cached: See `tokens_to_compute`.
    """
    num_new = tokens_to_compute(request, num_cached)
    return decode.takes_prompts and decode.backlog_tokens + num_new <= threshold


def with_stand_ins(snapshot: ClusterSnapshot, threshold: int) -> ClusterSnapshot:
    """Return a cluster in which decode nodes stand in for prefill nodes when none of these is up.

    Whoever chooses a pair of it takes the decode node alone. A prefill node of another model is up, too:
    nodes that were not meant for each other are told of, not covered up.

    Args:
        threshold: As for `stays_on_decode`; 0 lets no node stand in.
    """
    if not threshold or any(node.is_up for node in snapshot.prefills):
        return snapshot
    able = tuple(node for node in snapshot.decodes if node.is_up and node.takes_prompts)
    if not able:
        return snapshot
    # What runs on the others is still counted.
    decodes = tuple(
        replace(node, is_up=False) if node.is_up and not node.takes_prompts else node
        for node in snapshot.decodes
    )
    return ClusterSnapshot(prefills=able, decodes=decodes)
