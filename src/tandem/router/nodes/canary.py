"""The canary: a test that decode continues from a prefill node's KV as it does from its own KV.

```
 the same prompt ──▶ decode alone ─────────────▶ tokens ─┐
                 └─▶ prefill ──KV──▶ decode ───▶ tokens ─┴─▶ equal, or the pair is not used
```

Only nodes with an engine other than our own are tested. The fingerprint names the model and the KV layout that an engine
reports. If an engine's real layout differed, answers would be wrong and nothing else would detect it.
"""

import asyncio
import random
from collections.abc import Iterable, Sequence

from tandem.router.nodes.node import Node, NodeUnusable, halves
from tandem.telemetry.log import get_logger
from tandem.wire.errors import PeerLost, TandemError
from tandem.wire.generation import GenerateRequest, SamplingParams, new_request_id
from tandem.wire.messages import StartColocated
from tandem.wire.token_stream import Start, TokenStream

log = get_logger(__name__)

# Prompt lengths: part of a page, and several pages, with most engines.
PROMPT_TOKENS = (7, 80, 300)
# Answer length. Prefill may sample the first token, so one token would not test decode.
NUM_TOKENS = 3
# Near-equal logits may be ranked differently on another device. So most answers must be equal, not all, and a second
# round with other prompts runs before a pair is rejected.
NUM_ROUNDS = 2
TIMEOUT_S = 60.0
# Length of the repeated part of a prompt. Most models continue a repetition, so that one token is much more likely.
_PERIOD = 11


class Canary:
    """Tests pairs of a cluster's nodes.

    Args:
        nodes: All nodes of the cluster.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._nodes = nodes
        # Faults by the epochs of prefill and decode; empty for a pair that passed.
        self._faults: dict[tuple[int, int], str] = {}

    async def check(self, node: Node) -> None:
        """Test a node with a node in use. Without a partner it passes: it gets no requests before one joins.

        Raises:
            NodeUnusable: It is incompatible with the nodes in use, or could not be tested.
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
                self._mark_proven(node, partner)
                return
            fault = f"its KV is incompatible with {partner.role} {partner.url}: {fault}"
        if fault:
            raise NodeUnusable(fault)

    def _partners(self, node: Node) -> list[Node]:
        """Return the nodes in use to test a node with, proven nodes first."""
        assert node.info is not None
        same = node.info.model.fingerprint
        partners = [
            each
            for each in self._nodes
            if each.role != node.role and each.is_up and each.info is not None
            if each.info.model.fingerprint == same
        ]
        return sorted(partners, key=lambda each: not each.is_proven)

    def _mark_proven(self, *pair: Node) -> None:
        """Record that a pair passed. Nodes used without a test are suspended, and tested now that they have a partner."""
        log.info("node.proven", nodes=[node.url for node in pair])
        for node in pair:
            node.is_proven = True
        for node in self._nodes:
            if node.is_admitted and not node.is_proven:
                node.note(is_admitted=False, reason="is being tested with a known prompt")
                node.trouble.set()


def _epoch(node: Node) -> int:
    assert node.info is not None
    return node.info.epoch


async def _fault(prefill: Node, decode: Node) -> str:
    """Test a pair; return its fault, or an empty string.

    Raises:
        NodeUnusable: The pair could not be tested.
    """
    pair = f"prefill {prefill.url} and decode {decode.url}"
    answers: list[tuple[list[int], ...]] = []
    num_equal = 0
    for _ in range(NUM_ROUNDS):
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answers = [await _answers(prefill, decode, ids) for ids in _prompts(decode)]
        except TimeoutError as error:
            raise NodeUnusable(f"{pair} did not answer known prompts in {TIMEOUT_S:g} s") from error
        except TandemError as error:
            raise NodeUnusable(f"{pair} failed a known prompt: {error.message}") from error
        num_equal = sum(each[0] == each[-1] for each in answers)
        if 2 * num_equal > len(answers):
            return ""
    log.error("node.kv_differs", prefill=prefill.url, decode=decode.url, answers=answers)
    return (
        f"{len(answers) - num_equal} of {len(answers)} known prompts got a different answer than from decode alone; "
        "start both nodes with the same flags and the same version of the engine"
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
    """Return the answer of decode alone, if it takes prompts, and its answer from prefill's KV."""
    start_decode, start_prefill = halves(_request(prompt_ids), prefill, 1)
    attempts: list[list[tuple[Node, Start]]] = [[(decode, start_decode), (prefill, start_prefill)]]
    assert decode.info is not None
    if decode.info.takes_prompts:
        alone = StartColocated(request=_request(prompt_ids), attempt=1)
        attempts.insert(0, [(decode, alone)])
    return tuple([await _answer(starts) for starts in attempts])


def _request(prompt_ids: Sequence[int]) -> GenerateRequest:
    name = new_request_id()
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    # A unique salt keeps the two requests from sharing cached pages.
    return GenerateRequest(
        request_id=name, prompt_ids=list(prompt_ids), sampling=sampling, cache_salt=name
    )


async def _answer(starts: Sequence[tuple[Node, Start]]) -> list[int]:
    """Return the tokens of the answer; the first start must be decode's.

    Raises:
        TandemError: A half of the request failed.
    """
    wake, tokens = asyncio.Event(), dict[int, int]()
    streams: list[TokenStream] = []
    try:
        for node, start in starts:
            if node.client is None:
                raise PeerLost(f"{node.role} node {node.url} was lost")
            streams.append(node.client.generate(start, wake.set))
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
