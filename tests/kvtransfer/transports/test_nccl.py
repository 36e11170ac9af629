"""What is the groups' own; what every transport does is in test_transports.py."""

import pytest
import torch

from kvtransfer.transports.nccl import SENDER, GroupLane, NcclTransport
from tests.kvtransfer.transports.lane_cases import *  # noqa: F403
from tests.kvtransfer.transports.lane_rig import LaneRig


@pytest.fixture
def rig():
    made = LaneRig(
        NcclTransport(),
        lambda stream, region: GroupLane(stream, torch.from_numpy(region.array()), SENDER),
    )
    yield made
    made.close()


def test_the_global_group_of_the_process_is_left_alone(rig):
    rig.connect().close()
    assert not torch.distributed.is_initialized()
