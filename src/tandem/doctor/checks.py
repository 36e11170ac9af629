"""What the facts of a machine mean, and what to do. Pure: tests feed it machines that were made up."""

from collections.abc import Iterator

from packaging.specifiers import SpecifierSet

from tandem.doctor.device_checks import check_gpus, check_rdma
from tandem.doctor.facts import Facts, Model, Port
from tandem.doctor.report import Finding, Status
from tandem.kvtransfer.region import SHM_DIR

GIB = 1 << 30
# A node holds a socket for each client, edge worker and stream; 1,024 is many systems' default.
ENOUGH_OPEN_FILES = 4096
# Names of the kernel: x86's, then ARM's.
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}
# Beside weights and pool: the interpreter, libraries and activations of a chunk.
OVERHEAD_BYTES = GIB
# Named in the line about packages although nothing is wrong with them.
SHOWN_PACKAGES = ("torch", "transformers", "pyzmq", "msgspec")


def check(facts: Facts) -> list[Finding]:
    """Return everything that there is to say, area by area."""
    return [
        *_packages(facts),
        *_cpu(facts),
        *_memory(facts),
        *_limits(facts),
        *check_rdma(facts),
        *check_gpus(facts),
        *_network(facts),
        *(_port(port) for port in facts.ports),
        *(_model(facts.model, facts) if facts.model else ()),
    ]


def _packages(facts: Facts) -> Iterator[Finding]:
    is_fit = facts.python in SpecifierSet(facts.wanted_python)
    yield Finding(
        area="packages",
        name="python",
        status="ok" if is_fit else "failed",
        found=facts.python,
        advice="" if is_fit else f"install Python {facts.wanted_python}",
    )
    wrong = [
        each
        for each in facts.packages
        if each.found is None
        or not SpecifierSet(each.wanted).contains(each.found, prereleases=True)
    ]
    for each in wrong:
        yield Finding(
            area="packages",
            name=each.name,
            status="failed",
            found=each.found or "not installed",
            advice=f"pip install '{each.name}{each.wanted}'",
        )
    versions = {each.name: each.found for each in facts.packages}
    shown = [f"{name} {versions[name]}" for name in SHOWN_PACKAGES if versions.get(name)]
    yield Finding(
        area="packages",
        name="packages",
        status="failed" if wrong else "ok",
        found=f"{len(facts.packages) - len(wrong)} of {len(facts.packages)} as wanted; "
        + ", ".join(shown),
        advice="see the lines above" if wrong else "",
    )


def _cpu(facts: Facts) -> Iterator[Finding]:
    cpu = facts.cpu
    usable = cpu.num_usable if cpu.quota_cores is None else min(cpu.num_usable, cpu.quota_cores)
    is_throttled = cpu.quota_cores is not None and cpu.quota_cores < cpu.num_usable
    yield Finding(
        area="cpu",
        name="cores",
        status="warning" if is_throttled else "ok",
        found=f"{usable:g} of {cpu.num_cores} usable",
        advice=f"torch starts a thread for each of {cpu.num_usable} cores and the container stops them "
        f"for part of the time: give nodes --num-threads {max(1, int(usable))}"
        if is_throttled
        else "",
    )
    has_bf16 = bool(BF16_FLAGS & cpu.flags)
    yield Finding(
        area="cpu",
        name="bfloat16",
        status="ok" if has_bf16 or facts.gpus.names else "warning",
        found=", ".join(sorted(BF16_FLAGS & cpu.flags)) or "no instructions for it",
        advice=""
        if has_bf16 or facts.gpus.names
        else "bfloat16 is computed by way of float32 here: --dtype float32 may be faster",
    )
    if cpu.num_numa_nodes > 1:
        yield Finding(
            area="cpu",
            name="numa",
            status="ok",
            found=f"{cpu.num_numa_nodes} nodes",
            advice="start each node on one of them: numactl --cpunodebind=0 --membind=0 tandem …",
        )


def _memory(facts: Facts) -> Iterator[Finding]:
    memory = facts.memory
    is_limited = memory.limit is not None and memory.limit < memory.total
    yield Finding(
        area="memory",
        name="ram",
        status="ok",
        found=f"{_size(_usable_memory(facts))} usable of {_size(memory.total)}"
        + (f" (container: {_size(memory.limit or 0)})" if is_limited else ""),
    )
    pool = facts.pool_bytes
    if not facts.needs_shm:
        return
    if memory.shm_free is None:
        yield Finding(
            area="memory",
            name=str(SHM_DIR),
            status="missing",
            found="not there",
            advice="mount a tmpfs on /dev/shm, or start nodes with --transfer-backend tcp",
        )
    elif memory.shm_free < pool:
        yield Finding(
            area="memory",
            name=str(SHM_DIR),
            status="failed",
            found=f"{_size(memory.shm_free)} free, and a decode node's pool takes {_size(pool)}",
            advice="make it larger (docker: --shm-size; else mount -o remount,size=… /dev/shm), lower "
            "--max-total-tokens, or start nodes with --transfer-backend tcp",
        )
    else:
        yield Finding(
            area="memory",
            name=str(SHM_DIR),
            status="ok",
            found=f"{_size(memory.shm_free)} free for a pool of {_size(pool)}",
        )


def _limits(facts: Facts) -> Iterator[Finding]:
    locked, files = facts.limits.locked_bytes, facts.limits.open_files
    is_short = bool(facts.rdma.ports) and locked is not None and locked < facts.pool_bytes
    yield Finding(
        area="limits",
        name="locked memory",
        status="warning" if is_short else "ok",
        found="unlimited" if locked is None else f"{locked >> 10:,} KiB (ulimit -l)",
        advice=f"RDMA locks the whole pool, {_size(facts.pool_bytes)}: ulimit -l unlimited (docker: "
        "--ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)"
        if is_short
        else "",
    )
    is_few = files is not None and files < ENOUGH_OPEN_FILES
    yield Finding(
        area="limits",
        name="open files",
        status="warning" if is_few else "ok",
        found="unlimited" if files is None else f"{files:,} (ulimit -n)",
        advice=f"each client and stream is one: ulimit -n {ENOUGH_OPEN_FILES} or more"
        if is_few
        else "",
    )


def _network(facts: Facts) -> Iterator[Finding]:
    network = facts.network
    yield Finding(
        area="network",
        name="hostname",
        status="ok" if network.addresses else "warning",
        found=f"{network.hostname}: {', '.join(network.addresses) or 'does not resolve'}",
        advice=""
        if network.addresses
        else "add it to /etc/hosts, and give nodes --host ADDRESS rather than a name",
    )
    yield Finding(
        area="network",
        name="ipv6",
        status="ok" if network.has_ipv6 else "missing",
        found="works" if network.has_ipv6 else "off",
        advice="" if network.has_ipv6 else "give IPv4 addresses to --host, not :: or ::1",
    )


def _port(port: Port) -> Finding:
    # A port of ours that is taken is most likely a node that runs; one that was asked for must be free.
    status: Status = "failed" if port.is_asked else "warning"
    return Finding(
        area="ports",
        name=f"{port.host}:{port.number}",
        status=status if port.problem else "ok",
        found=port.problem or f"free, for {port.purpose}",
        advice=f"if no node of yours has it, find who does (ss -ltnp), or give another port for "
        f"{port.purpose}"
        if port.problem
        else "",
    )


def _model(model: Model, facts: Facts) -> Iterator[Finding]:
    is_gpu = model.device != "cpu"
    has = model.device_memory_bytes if is_gpu else _usable_memory(facts)
    needs = model.weight_bytes + model.pool_bytes + OVERHEAD_BYTES
    fits = needs <= has and model.num_tokens > 0
    where = "GPU memory" if is_gpu else "memory"
    yield Finding(
        area="model",
        name=model.name,
        status="ok" if fits else "failed",
        found=f"{_size(model.weight_bytes)} of {model.dtype} weights + {_size(model.pool_bytes)} of KV "
        f"({model.num_tokens:,} tokens of {model.kv_bytes_per_token:,} bytes) in {_size(has)} of {where}",
        advice="" if fits else _smaller(model, has),
    )
    if fits and model.num_tokens < model.context_length:
        yield Finding(
            area="model",
            name="context",
            status="warning",
            found=f"{model.num_tokens:,} tokens of KV for a context of {model.context_length:,}",
            advice=f"a longer prompt is refused: give --max-total-tokens {model.context_length} or more",
        )


def _smaller(model: Model, has: int) -> str:
    if not has:
        return f"torch sees no GPU here: --device {model.device} cannot be"
    room = has - model.weight_bytes - OVERHEAD_BYTES
    num_tokens = room // model.kv_bytes_per_token
    if num_tokens < 1:
        return "the weights alone do not fit: a smaller model, a larger machine, or --tp over more GPUs"
    return f"give --max-total-tokens {num_tokens // 1024 * 1024 or num_tokens} at most"


def _usable_memory(facts: Facts) -> int:
    memory = facts.memory
    return memory.available if memory.limit is None else min(memory.available, memory.limit)


def _size(size_bytes: int) -> str:
    is_large = size_bytes >= GIB
    return f"{size_bytes / GIB:.1f} GiB" if is_large else f"{size_bytes >> 20} MiB"
