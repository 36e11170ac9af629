"""What is said of machines that were made up."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tandem.doctor.checks import GIB, OVERHEAD_BYTES, check
from tandem.doctor.facts import (
    Cpu,
    Facts,
    Gpus,
    Limits,
    Memory,
    Model,
    Network,
    Package,
    Port,
    Rdma,
    RdmaPort,
)
from tandem.doctor.report import Finding

ACTIVE = RdmaPort("mlx5_0", 1, "ACTIVE", "InfiniBand", 50e9)
GOOD = Facts(
    python="3.12.1",
    wanted_python=">=3.11",
    packages=(Package("torch", ">=2.11", "2.13.0+cpu"), Package("pyzmq", ">=26", "27.3.0")),
    cpu=Cpu(num_cores=8, num_usable=8, flags=frozenset({"avx512_bf16"})),
    memory=Memory(
        total=64 * GIB, available=60 * GIB, limit=None, shm_total=32 * GIB, shm_free=32 * GIB
    ),
    limits=Limits(locked_bytes=None, open_files=1 << 20),
    rdma=Rdma((ACTIVE,), {"uverbs0": True}),
    gpus=Gpus("570.1", 2, ("H200", "H200"), "12.8", has_peermem=True),
    network=Network("host", ("10.0.0.1",)),
    ports=(Port("127.0.0.1", 7000, "prefill"),),
    pool_bytes=GIB,
    model=Model("m", "bfloat16", 10 * GIB, 1 << 16, 1 << 17, 8 * GIB, 8192),
)


def found(facts: Facts, name: str) -> Finding:
    [finding] = [each for each in check(facts) if each.name == name]
    return finding


def test_a_machine_that_has_everything_gets_no_advice():
    assert {finding.status for finding in check(GOOD)} == {"ok"}
    assert [finding.advice for finding in check(GOOD) if finding.advice] == []


def test_what_is_not_ok_always_says_what_to_do():
    bare = Facts(
        python="3.9.0",
        wanted_python=">=3.11",
        packages=(Package("torch", ">=2.11", None),),
        memory=Memory(shm_free=0),
        limits=Limits(1024, 256),
        rdma=Rdma((replace(ACTIVE, state="DOWN"),), {"uverbs0": False}),
        gpus=Gpus("570.1", 0),
        network=Network(addresses=(), has_ipv6=False),
        ports=(Port("127.0.0.1", 7000, "prefill", "Address already in use"),),
        pool_bytes=GIB,
    )
    silent = [each for each in check(bare) if each.status != "ok" and not each.advice]
    assert silent == []


def test_a_package_that_is_too_old_or_not_there_is_named_with_its_pip_line():
    old = replace(GOOD, packages=(Package("torch", ">=2.11", "2.9.1"),))
    assert found(old, "torch").status == "failed"
    assert found(old, "torch").advice == "pip install 'torch>=2.11'"
    gone = replace(GOOD, packages=(Package("pyzmq", ">=26", None),))
    assert found(gone, "pyzmq").found == "not installed"
    assert found(gone, "packages").found.startswith("0 of 1 as wanted")


def test_a_build_or_a_prerelease_of_a_package_is_as_good_as_its_release():
    for version in ("2.13.0+cu128", "2.12.0a0+git1234"):
        facts = replace(GOOD, packages=(Package("torch", ">=2.11", version),))
        assert found(facts, "packages").status == "ok"


def test_an_old_python_fails():
    assert found(replace(GOOD, python="3.10.2"), "python").status == "failed"


def test_a_container_with_fewer_cores_than_threads_is_warned_of():
    facts = replace(GOOD, cpu=replace(GOOD.cpu, quota_cores=2.5))
    cores = found(facts, "cores")
    assert cores.status == "warning"
    assert cores.found == "2.5 of 8 usable"
    assert "--num-threads 2" in cores.advice


def test_bfloat16_without_instructions_matters_only_without_a_gpu():
    cpu = replace(GOOD.cpu, flags=frozenset({"avx2"}))
    assert found(replace(GOOD, cpu=cpu), "bfloat16").status == "ok"
    assert found(replace(GOOD, cpu=cpu, gpus=Gpus()), "bfloat16").status == "warning"


def test_several_memories_get_a_hint_and_no_warning():
    numa = found(replace(GOOD, cpu=replace(GOOD.cpu, num_numa_nodes=2)), "numa")
    assert (numa.status, numa.found) == ("ok", "2 nodes")
    assert "numactl" in numa.advice


@given(free=st.integers(0, 64 * GIB), pool=st.integers(1, 64 * GIB))
def test_dev_shm_fails_exactly_when_the_pool_does_not_fit(free, pool):
    facts = replace(GOOD, memory=replace(GOOD.memory, shm_free=free), pool_bytes=pool)
    assert found(facts, "/dev/shm").status == ("ok" if pool <= free else "failed")


def test_dev_shm_is_not_looked_at_where_nothing_needs_it():
    facts = replace(GOOD, memory=replace(GOOD.memory, shm_free=0), needs_shm=False)
    assert "/dev/shm" not in [each.name for each in check(facts)]


@given(
    weights=st.integers(0, 200 * GIB),
    tokens=st.integers(1, 1 << 22),
    token_bytes=st.integers(1, 1 << 20),
    limit=st.none() | st.integers(0, 100 * GIB),
)
def test_a_model_fits_exactly_when_weights_pool_and_the_rest_do(
    weights, tokens, token_bytes, limit
):
    model = Model("m", "bfloat16", weights, token_bytes, tokens, tokens * token_bytes, 1)
    facts = replace(GOOD, model=model, memory=replace(GOOD.memory, limit=limit))
    room = min(60 * GIB, 60 * GIB if limit is None else limit)
    fits = weights + model.pool_bytes + OVERHEAD_BYTES <= room
    finding = found(facts, "m")
    assert finding.status == ("ok" if fits else "failed")
    if "--max-total-tokens" in finding.advice:
        advised = int(finding.advice.split()[2])
        assert 0 < advised < tokens
        assert weights + advised * token_bytes + OVERHEAD_BYTES <= room


def test_a_model_on_gpus_is_held_against_their_memory():
    model = replace(GOOD.model, device="cuda", device_memory_bytes=GIB)
    assert "GPU memory" in found(replace(GOOD, model=model), "m").found
    assert found(replace(GOOD, model=model), "m").status == "failed"
    none = replace(GOOD, model=replace(model, device_memory_bytes=0))
    assert found(none, "m").advice == "torch sees no GPU here: --device cuda cannot be"


def test_a_pool_below_the_context_is_warned_of():
    facts = replace(GOOD, model=replace(GOOD.model, num_tokens=4096))
    assert found(facts, "context").status == "warning"
    assert "--max-total-tokens 8192" in found(facts, "context").advice


def test_locked_memory_matters_where_rdma_has_to_lock_the_pool():
    short = replace(GOOD, limits=Limits(locked_bytes=8 << 20, open_files=None))
    assert found(short, "locked memory").status == "warning"
    assert "memlock" in found(short, "locked memory").advice
    assert found(replace(short, rdma=Rdma()), "locked memory").status == "ok"


def test_few_open_files_are_warned_of():
    few = found(replace(GOOD, limits=Limits(None, 1024)), "open files")
    assert few.status == "warning"
    assert "ulimit -n" in few.advice


def test_no_rdma_is_missing_and_no_fault():
    statuses = {(each.area, each.status) for each in check(replace(GOOD, rdma=Rdma()))}
    assert ("rdma", "missing") in statuses
    assert not any(status == "failed" for _, status in statuses)


def test_a_port_that_is_down_and_devices_that_may_not_be_opened_are_warned_of():
    down = replace(GOOD, rdma=Rdma((replace(ACTIVE, state="DOWN"),), {"uverbs0": True}))
    assert found(down, "mlx5_0 port 1").status == "warning"
    closed = replace(GOOD, rdma=Rdma((ACTIVE,), {"uverbs0": True, "uverbs1": False}))
    assert found(closed, "permissions").found == "no access to uverbs1"
    absent = replace(GOOD, rdma=Rdma((ACTIVE,), {}))
    assert "ib_uverbs" in found(absent, "permissions").advice


def gpu_finding(gpus: Gpus) -> Finding:
    return next(each for each in check(replace(GOOD, gpus=gpus)) if each.area == "gpu")


def test_gpus_that_torch_cannot_use_say_why():
    assert "build for CPUs" in gpu_finding(Gpus("570.1", 2)).advice
    assert "nvidia-smi" in gpu_finding(Gpus("", 2, torch_cuda="12.8", error="no driver")).advice
    assert "--gpus all" in gpu_finding(Gpus("570.1", 0)).advice
    assert gpu_finding(Gpus()).status == "missing"


def test_gpudirect_needs_its_kernel_module_only_where_there_is_rdma():
    without = replace(GOOD, gpus=replace(GOOD.gpus, has_peermem=False))
    assert "nvidia-peermem" in found(without, "gpudirect").advice
    names = [each.name for each in check(replace(without, rdma=Rdma()))]
    assert "gpudirect" not in names


def test_gpus_that_cannot_reach_each_other_are_counted():
    facts = replace(GOOD, gpus=replace(GOOD.gpus, without_peer_access=((0, 1),)))
    assert found(facts, "peer access").found.startswith("1 pairs")


def test_a_name_that_does_not_resolve_and_no_ipv6_are_told():
    facts = replace(GOOD, network=Network("host", (), has_ipv6=False))
    assert found(facts, "hostname").status == "warning"
    assert found(facts, "ipv6").status == "missing"


def test_a_taken_port_fails_only_when_it_was_asked_for():
    taken = Port("127.0.0.1", 7000, "prefill", "Address already in use")
    assert found(replace(GOOD, ports=(taken,)), "127.0.0.1:7000").status == "warning"
    asked = replace(taken, is_asked=True)
    assert found(replace(GOOD, ports=(asked,)), "127.0.0.1:7000").status == "failed"
