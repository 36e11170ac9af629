"""That real nodes tell a real router what they have cached, and it sends prompts there."""

from tests.e2e.clients import QUIET, SIMULATED, generate, nodes_of
from tests.e2e.cluster import eventually, running_cluster


def test_a_prompt_goes_back_to_the_nodes_that_have_it():
    prompt, others = [5 + i % 90 for i in range(600)], [[7 + i] * 300 for i in range(2)]
    router_flags = ("--policy", "cache_aware", *QUIET)
    with running_cluster(
        *SIMULATED, *QUIET, "--zone", "here", prefills=2, decodes=2, router_flags=router_flags
    ) as up:

        def num_blocks() -> list[int]:
            return sorted(node["prefixes"]["num_blocks"] for node in nodes_of(up.url))

        assert eventually(lambda: {node["zone"] for node in nodes_of(up.url)} == {"here"})

        body = {"max_new_tokens": 4, "temperature": 0}
        first = generate(up.url, input_ids=prompt, **body)
        assert first["meta_info"]["cached_tokens"] == 0
        assert eventually(lambda: num_blocks() == [0, 0, 4, 4])
        for other in others:
            generate(up.url, input_ids=other, **body)
            again = generate(up.url, input_ids=prompt, **body)
            assert again["output_ids"] == first["output_ids"]
            assert again["meta_info"]["cached_tokens"] >= 512
