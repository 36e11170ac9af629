"""The group of a node that is one rank of vLLM's data parallelism: its rendezvous, and sums over its ranks."""

import json
from collections.abc import Sequence
from datetime import timedelta
from ipaddress import ip_address
from os import environ
from typing import Any

import torch
from torch.distributed import all_reduce
from vllm.config import VllmConfig
from vllm.distributed.utils import create_tcp_store

from tandem.engine.errors import DeviceLost
from tandem.telemetry.log import get_logger
from tandem.vllm.node.lockstep import Lockstep
from tandem.wire.errors import ConfigInvalid, EngineFailed

log = get_logger(__name__)

# Ports on which the ranks and their workers connect to each other. Rank 0 has found free ones.
_PORTS = ("data_parallel_master_port", "_data_parallel_master_port_list")


class DataParallelGroup:
    """The connections between the ranks of a group. Rank 0 serves a store, where the others find what they need.

    Args:
        vllm_config: vLLM's settings. The constructor sets the ports in them.
        kind: What the ranks must have in common besides vLLM's parallel settings.
        timeout_s: Time limit of a sum.

    Attributes:
        lockstep: When the group steps.

    Raises:
        ConfigInvalid: The ranks have different settings, or cannot connect; the message says what to do.
    """

    def __init__(self, vllm_config: VllmConfig, kind: str, timeout_s: float) -> None:
        self._parallel: Any = vllm_config.parallel_config
        self._timeout = timedelta(seconds=timeout_s)
        parallel = self._parallel
        check_interface("--data-parallel-address", parallel.data_parallel_master_ip)
        self._store: Any = self._connect()
        self._check_equal("flags", f"{kind} {parallel.compute_hash()}")
        rank = parallel.data_parallel_rank
        if self._store.add(f"rank {rank}", 1) > 1:
            raise ConfigInvalid(
                f"the data-parallel group already has a rank {rank}; set a different --data-parallel-rank on each rank, "
                "and restart all ranks together",
                topic="docs/vllm.md",
            )
        ports = json.dumps([getattr(parallel, name) for name in _PORTS])
        for name, port in zip(_PORTS, json.loads(self._of_first("ports", ports)), strict=True):
            setattr(parallel, name, port)
        parallel._coord_store_port = parallel.data_parallel_rpc_port  # noqa: SLF001 - as vLLM's launcher does
        parallel.data_parallel_rank_local = 0
        log.info("data_parallel.joining", rank=rank, size=parallel.data_parallel_size)
        try:
            self._group = parallel.stateless_init_dp_group()
        except RuntimeError as error:
            raise EngineFailed(f"the data-parallel ranks did not connect: {error}") from error
        self.lockstep = Lockstep(self._sum, parallel.data_parallel_size, parallel.dp_sync_interval)

    def _connect(self) -> Any:
        """Return the `TCPStore` of the group."""
        parallel = self._parallel
        host, port = parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port
        rank = parallel.data_parallel_rank
        try:
            return create_tcp_store(host, port, is_master=rank == 0, wait_for_workers=False)
        except RuntimeError as error:
            problem = "rank 0 does not answer" if rank else "rank 0 cannot listen"
            raise ConfigInvalid(
                f"{problem} at {host}, port {port}; set the same --data-parallel-address and "
                f"--data-parallel-rpc-port on all ranks of a group, and a different port for each group: {error}",
                topic="docs/vllm.md",
            ) from error

    def wait_ready(self, fingerprint: str) -> None:
        """Wait until every rank has loaded its model; raise `ConfigInvalid` if rank 0 has a different one."""
        try:
            all_reduce(torch.zeros(1), group=self._group)
        except RuntimeError as error:
            raise EngineFailed(f"a different data-parallel rank did not start: {error}") from error
        self._check_equal("models", fingerprint)

    def _check_equal(self, name: str, value: str) -> None:
        if self._of_first(name, value) != value:
            raise ConfigInvalid(
                f"this rank and rank 0 of its data-parallel group have different {name}; start all ranks with the same "
                "role, model and flags, except --data-parallel-rank and ports",
                topic="docs/vllm.md",
            )

    def _of_first(self, name: str, value: str) -> str:
        """Return rank 0's `value`."""
        if self._parallel.data_parallel_rank == 0:
            self._store.set(name, value)
        return str(self._store.get(name).decode())

    def _sum(self, values: Sequence[int]) -> Sequence[int]:
        tensor = torch.tensor(values)
        try:
            all_reduce(tensor, group=self._group, async_op=True).wait(self._timeout)
        except RuntimeError as error:
            raise DeviceLost(
                f"a different data-parallel rank has ended or hangs: {error}"
            ) from error
        return [int(value) for value in tensor]


def check_interface(flag: str, host: str) -> None:
    """Raise `ConfigInvalid` if gloo listens on the loopback interface only, but `host` is on a network."""
    try:
        is_local = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not is_local and environ.get("GLOO_SOCKET_IFNAME") == "lo":
        raise ConfigInvalid(
            f"{flag} {host}: set GLOO_SOCKET_IFNAME to the network interface that reaches the other ranks",
            topic="docs/vllm.md",
        )
