"""Our router over SGLang's contract, which our own nodes accept: the same answers as over the node protocol."""

import asyncio

from tests.e2e.cluster import ask, running
from tests.e2e.test_other_routers import answers, assert_same


def test_answers_over_sglangs_contract_are_those_of_the_node_protocol(cluster, embedded_model):
    [prefill], [decode] = cluster.prefill_urls, cluster.decode_urls
    nodes = ("--prefill", f"sglang+{prefill}", "--decode", f"sglang+{decode}")
    model = ask(f"{cluster.url}/v1/models")[1]["data"][0]["id"]
    with running("lb", *nodes, "--tokenizer", str(embedded_model)) as (url, _):
        found = asyncio.run(answers(url, model))
    assert_same(found, asyncio.run(answers(cluster.url, model)))
