"""A known prompt before those of clients: does decode go on behind a prefill's KV as behind its own?

```
 the same prompt ──▶ decode alone ─────────────▶ tokens ─┐
                 └─▶ prefill ──KV──▶ decode ───▶ tokens ─┴─▶ alike, or the pair is not used
```

Only nodes whose engine is not our own are tried. A fingerprint names the model and the layout as the engine reports them;
an engine that lays its KV out otherwise than it reports would answer wrongly, and nobody would notice.
"""

import asyncio
import random
from collections.abc import Iterable, Sequence

from tandem.frontend.token_stream import Start, TokenStream
from tandem.router.node import Node, NodeUnusable, halves
from tandem.telemetry.log import get_logger
from tandem.wire.errors import PeerLost, TandemError
from tandem.wire.generation import GenerateRequest, SamplingParams, new_request_id
from tandem.wire.messages import StartColocated

log = get_logger(__name__)

# A part of a page, and several pages of most engines.
PROMPT_TOKENS = (7, 80, 300)
# Prefill may draw the first.
NUM_TOKENS = 3
# Close likelihoods may fall out differently when a prompt is computed elsewhere: most answers have to be alike, and
# other prompts are asked before a pair is refused.
NUM_ROUNDS = 2
TIMEOUT_S = 60.0
# A prompt that repeats itself is gone on with by most models, so that one token is much likelier than others.
_PERIOD = 11


class Canary:
    """Tries the nodes of a cluster with each other.

    Args:
        nodes: All nodes of the cluster.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._nodes = nodes
        # By the epochs of prefill and decode.
        self._faults: dict[tuple[int, int], str] = {}

    async def check(self, node: Node) -> None:
        """Try a node with one that is in use. Without one, it may be used: nothing runs on it before another joins.

        Raises:
            NodeUnusable: It does not fit the nodes in use, or could not be tried.
        """
        if node.is_proven:
            return
        fault = ""
        for partner in self._partners(node):
            prefill, decode = (node, partner) if node.role == "prefill" else (partner, node)
            key = _epoch(prefill), _epoch(decode)
            if key not in self._faults:
                self._faults[key] = await _fault(prefill, decode)
            fault = self._faults[key]
            if not fault:
                del self._faults[key]
                self._proven(node, partner)
                return
            fault = f"its KV does not fit that of {partner.role} {partner.url}: {fault}"
        if fault:
            raise NodeUnusable(fault)

    def _partners(self, node: Node) -> list[Node]:
        """Return nodes in use to try a node with, proven ones first."""
        assert node.info is not None
        same = node.info.model.fingerprint
        partners = [
            each
            for each in self._nodes
            if each.role != node.role and each.is_up and each.info is not None
            if each.info.model.fingerprint == same
        ]
        return sorted(partners, key=lambda each: not each.is_proven)

    def _proven(self, *pair: Node) -> None:
        """Use this pair. What was used without proof is tried first, now that it can be."""
        log.info("node.proven", nodes=[node.url for node in pair])
        for node in pair:
            node.is_proven = True
        for node in self._nodes:
            if node.is_admitted and not node.is_proven:
                node.note(is_admitted=False, reason="is tried with a known prompt")
                node.trouble.set()


def _epoch(node: Node) -> int:
    assert node.info is not None
    return node.info.epoch


async def _fault(prefill: Node, decode: Node) -> str:
    """Return what shows that a pair cannot be used, or an empty string.

    Raises:
        NodeUnusable: The pair could not be tried.
    """
    where = f"a known prompt over prefill {prefill.url} and decode {decode.url}"
    answers: list[tuple[list[int], ...]] = []
    num_alike = 0
    for _ in range(NUM_ROUNDS):
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answers = [await _answers(prefill, decode, ids) for ids in _prompts(decode)]
        except TimeoutError as error:
            raise NodeUnusable(
                f"{where} do not answer a known prompt in {TIMEOUT_S:g} s"
            ) from error
        except TandemError as error:
            raise NodeUnusable(f"{where} fail a known prompt: {error.message}") from error
        num_alike = sum(alone == apart for alone, apart in answers)
        if 2 * num_alike > len(answers):
            return ""
    log.error("node.kv_differs", prefill=prefill.url, decode=decode.url, answers=answers)
    return (
        f"{len(answers) - num_alike} of {len(answers)} known prompts are answered otherwise than by decode alone; give both "
        "the same flags, and the same version of the engine"
    )


def _prompts(decode: Node) -> list[list[int]]:
    assert decode.info is not None
    model = decode.info.model
    longest = decode.info.max_prompt_tokens or model.context_length
    longest = max(1, min(longest, model.context_length) - NUM_TOKENS)
    prompts = []
    for num_tokens in PROMPT_TOKENS:
        period = random.sample(range(model.vocab_size), min(_PERIOD, model.vocab_size))
        prompts.append([period[i % len(period)] for i in range(min(num_tokens, longest))])
    return prompts


async def _answers(prefill: Node, decode: Node, prompt_ids: Sequence[int]) -> tuple[list[int], ...]:
    """Return what decode answers alone, and behind the KV of prefill."""
    alone, apart = _request(prompt_ids), _request(prompt_ids)
    start_decode, start_prefill = halves(apart, prefill, 1)
    return (
        await _answer([(decode, StartColocated(request=alone, attempt=1))]),
        await _answer([(decode, start_decode), (prefill, start_prefill)]),
    )


def _request(prompt_ids: Sequence[int]) -> GenerateRequest:
    name = new_request_id()
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    # Salted: it finds nothing of the other in a cache.
    return GenerateRequest(
        request_id=name, prompt_ids=list(prompt_ids), sampling=sampling, cache_salt=name
    )


async def _answer(starts: Sequence[tuple[Node, Start]]) -> list[int]:
    """Return the answer's tokens; the first start is that of decode.

    Raises:
        TandemError: A half failed.
    """
    wake, tokens = asyncio.Event(), dict[int, int]()
    streams: list[TokenStream] = []
    try:
        for node, start in starts:
            if node.client is None:
                raise PeerLost(f"{node.role} node {node.url} was lost")
            streams.append(node.client.generate(start, wake))
        while True:
            for stream in streams:
                while (delta := stream.take()) is not None:
                    tokens.update(enumerate(delta.token_ids, delta.index))
                    if delta.finish is not None and stream is streams[0]:
                        return [tokens[index] for index in sorted(tokens)]
            await wake.wait()
            wake.clear()
    finally:
        for stream in streams:
            stream.close()
