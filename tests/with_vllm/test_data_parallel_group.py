"""How data-parallel ranks find each other, without engines: the ranks are threads."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tandem.cli.up import free_ports
from tandem.engine.errors import DeviceLost
from tandem.wire.errors import ConfigInvalid

# vLLM's dependencies raise deprecation warnings on import.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def port():
    return free_ports(1)[0]


def join(port, rank, kind="decode", timeout_s=60.0, **settings):
    from vllm.config import ParallelConfig

    from tandem.vllm.node.data_parallel import DataParallelGroup

    own = {"data_parallel_size": 2, "data_parallel_external_lb": True, "is_moe_model": True}
    settings = own | settings | {"data_parallel_rank": rank, "data_parallel_rpc_port": port}
    config = SimpleNamespace(parallel_config=ParallelConfig(**settings))
    return DataParallelGroup(config, kind, timeout_s)


def join_both(port, **settings):
    """Join both ranks at once; return their groups."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: join(port, rank, **settings), range(2)))


def test_request_of_one_rank_starts_both(port):
    groups = join_both(port)
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                lambda each: each[1].lockstep.meet(has_requests=each[0] == 1), enumerate(groups)
            )
        )
    assert [group.lockstep.is_running for group in groups] == [True, True]


def test_rank_that_hangs_ends_the_others_within_the_step_limit(port):
    first, hanging = join_both(port, timeout_s=0.5)
    with pytest.raises(DeviceLost, match="hangs"):
        first.lockstep.meet(has_requests=True)
    hanging.lockstep.meet(has_requests=True)  # else gloo's thread would outlive the test


@pytest.mark.parametrize("settings", [{"kind": "prefill"}, {"enable_expert_parallel": True}])
def test_rank_with_other_flags_cannot_join(port, settings):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, port, 0)
        with pytest.raises(ConfigInvalid, match="different flags"):
            join(port, 1, **settings)
        _second = join(port, 1)
        assert first.result()


def test_rank_that_died_cannot_join_again(port):
    _groups = join_both(port)
    with pytest.raises(ConfigInvalid, match="already has a rank 1"):
        join(port, 1)


def test_two_groups_cannot_share_a_port(port):
    _groups = join_both(port)
    with pytest.raises(ConfigInvalid, match=r"rank 0 cannot listen.* --data-parallel-rpc-port"):
        join(port, 0)


def test_address_of_a_network_needs_an_interface(port, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(ConfigInvalid, match="GLOO_SOCKET_IFNAME"):
        join(port, 0, data_parallel_master_ip="10.0.0.5")


def test_rank_with_a_different_model_does_not_start(port):
    first, second = join_both(port)
    with ThreadPoolExecutor(1) as pool:
        ready = pool.submit(first.wait_ready, "model")
        with pytest.raises(ConfigInvalid, match="different models"):
            second.wait_ready("other model")
        assert ready.result() is None
