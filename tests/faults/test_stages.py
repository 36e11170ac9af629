import pytest

from tandem.wire.messages import NodeLoad
from tests.faults.cells import STAGES
from tests.faults.stages import View, in_stage

IDLE = {"p0": NodeLoad(), "d0": NodeLoad()}
# What two nodes say while one request goes from one end to the other, and the tokens that its client has.
STORY = {
    "waiting": (NodeLoad(num_waiting=1), NodeLoad(num_waiting=1), 0),
    "prefilling": (NodeLoad(num_running=1), NodeLoad(num_transferring=1), 0),
    "pushing": (NodeLoad(num_transferring=1), NodeLoad(num_transferring=1), 1),
    "landed": (NodeLoad(pushed_bytes=9), NodeLoad(num_running=1, generated_tokens=1), 1),
    "streaming": (
        NodeLoad(generated_tokens=1),
        NodeLoad(num_running=1, generated_tokens=12),
        12,
    ),
}


@pytest.mark.parametrize("name", ["p0", "d0"])
@pytest.mark.parametrize("stage", STORY)
def test_a_stage_is_told_from_those_before_it(name, stage):
    met = []
    for at, (prefill, decode, num_tokens) in STORY.items():
        view = View({"p0": prefill, "d0": decode}, IDLE, num_tokens)
        if in_stage(view, name, stage):
            met.append(at)
    assert met[0] == stage
    assert stage in STAGES


def test_a_node_that_says_nothing_is_at_no_stage():
    assert not in_stage(View({}, IDLE, 0), "p0", "waiting")
