"""That real nodes tell a real router what they have cached, and it sends prompts there."""

from tests.e2e.cluster import eventually, get_json, running_cluster
from tests.e2e.test_simulated import FLAGS, QUIET, generate


def test_a_prompt_goes_back_to_the_nodes_that_have_it():
    prompt, others = [5 + i % 90 for i in range(600)], [[7 + i] * 300 for i in range(2)]
    policy = ("--policy", "cache_aware", "--zone", "here")
    with running_cluster(2, 2, *FLAGS, *QUIET, *policy) as up:

        def num_blocks() -> list[int]:
            nodes = get_json(f"{up.url}/server_info")["nodes"]
            assert {node["zone"] for node in nodes} == {"here"}
            return sorted(node["prefixes"]["num_blocks"] for node in nodes)

        body = {"max_new_tokens": 4, "temperature": 0}
        first = generate(up.url, input_ids=prompt, **body)
        assert first["meta_info"]["cached_tokens"] == 0
        eventually(lambda: num_blocks() == [0, 0, 4, 4])
        for other in others:
            generate(up.url, input_ids=other, **body)
            again = generate(up.url, input_ids=prompt, **body)
            assert again["output_ids"] == first["output_ids"]
            assert again["meta_info"]["cached_tokens"] >= 512
