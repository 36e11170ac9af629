"""What is true of one machine, as values: gathered by `gather`, judged by `checks`, made up by tests."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Package:
    """One that Tandem asks for. `wanted` is a specifier such as `>=26`; None: not installed."""

    name: str
    wanted: str
    found: str | None


@dataclass(frozen=True, slots=True)
class Cpu:
    """What computes.

    Attributes:
        num_usable: Cores that this process may run on.
        quota_cores: What a container may use, in cores; None: as many as there are.
        flags: Instruction sets, as the kernel names them.
        num_numa_nodes: Memories with cores of their own.
    """

    num_cores: int = 1
    num_usable: int = 1
    quota_cores: float | None = None
    flags: frozenset[str] = frozenset()
    num_numa_nodes: int = 1


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `limit` is a container's; `shm_*` is /dev/shm, None where there is none."""

    total: int = 0
    available: int = 0
    limit: int | None = None
    shm_total: int | None = None
    shm_free: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What a process may take (soft limits); None: as much as it likes."""

    locked_bytes: int | None = None
    open_files: int | None = None


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA device. `state` and `link` as the kernel says, such as ACTIVE, InfiniBand."""

    device: str
    number: int
    state: str
    link: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Rdma:
    """RDMA devices, and whether this user may open each of /dev/infiniband/uverbs*."""

    ports: tuple[RdmaPort, ...] = ()
    verbs: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gpus:
    """NVIDIA GPUs.

    Attributes:
        driver: Its version; empty: no driver is loaded.
        device_files: How many /dev/nvidia0 … there are.
        names: As torch sees them.
        torch_cuda: The CUDA that torch was built with; empty: a build without.
        without_peer_access: Pairs that cannot read each other's memory directly.
        has_peermem: The kernel lets RDMA devices reach GPU memory (nvidia-peermem).
        error: Why torch cannot use them.
    """

    driver: str = ""
    device_files: int = 0
    names: tuple[str, ...] = ()
    torch_cuda: str = ""
    without_peer_access: tuple[tuple[int, int], ...] = ()
    has_peermem: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class Port:
    """One that a node would listen on. `problem`: why it cannot; empty: it can.

    Attributes:
        is_asked: The user named it, rather than us.
    """

    host: str
    number: int
    purpose: str
    problem: str = ""
    is_asked: bool = False


@dataclass(frozen=True, slots=True)
class Network:
    """The name of this host, what it resolves to (nothing: it does not), and whether IPv6 works."""

    hostname: str = "localhost"
    addresses: tuple[str, ...] = ("127.0.0.1",)
    has_ipv6: bool = True


@dataclass(frozen=True, slots=True)
class Model:
    """What a model would take on this machine.

    Attributes:
        weight_bytes: Of all ranks of one node together.
        pool_bytes: Of all ranks together; `num_tokens` of KV.
        device: Where both would be.
    """

    name: str
    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    num_tokens: int
    pool_bytes: int
    context_length: int
    device: str = "cpu"
    device_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything.

    Attributes:
        pool_bytes: What a decode node would make; where `needs_shm`, in /dev/shm.
        model: Only where one was named.
    """

    python: str
    wanted_python: str = ""
    packages: tuple[Package, ...] = ()
    cpu: Cpu = Cpu()
    memory: Memory = Memory()
    limits: Limits = Limits()
    rdma: Rdma = field(default_factory=Rdma)
    gpus: Gpus = Gpus()
    network: Network = Network()
    ports: tuple[Port, ...] = ()
    pool_bytes: int = 0
    needs_shm: bool = True
    model: Model | None = None
