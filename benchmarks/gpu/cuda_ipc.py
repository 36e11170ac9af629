"""The rate of `cuda_ipc` compared with torch's copy on the same devices.

    python -m benchmarks.gpu.cuda_ipc [--size-mib 1024] [--rounds 15]

Two processes have pools of twice the size, on two GPUs if the host has them. *Contiguous* is one copy; *pages* and
*scattered* copy random pages of 2 MiB and blocks of 64 KiB to random places; *tp* copies half of the heads of pages, in
runs of 16 KiB. The limit is torch's copy of the same number of bytes between the same devices in one process,
measured in interleaved rounds. The result line is for the contiguous case. The benchmark verifies the received bytes.
"""

import argparse
import hashlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import msgspec
import torch

from benchmarks.rig import parse, parser_of, result
from benchmarks.transfer import BLOCK_BYTES, ROOM, make_plans, make_tp_plans
from tandem.kvtransfer.region import DeviceRegion
from tandem.kvtransfer.transports.base import Pool
from tandem.kvtransfer.transports.cuda_ipc import CudaIpcTransport
from tandem.wire.hand_off import TransportOffer

GOAL = 0.8


def far_device() -> str:
    return f"cuda:{torch.cuda.device_count() - 1}"


def listen(pool_bytes: int) -> None:
    """Run the receiving end until stdin closes; print the pool's hash for each input line."""
    memory = torch.zeros(pool_bytes, dtype=torch.uint8, device=far_device())
    num_pages = pool_bytes // BLOCK_BYTES
    pool = Pool.packed(DeviceRegion(memory), BLOCK_BYTES, num_pages)
    listener = CudaIpcTransport().listen(pool)
    admission = listener.admit("")
    listener.permit(admission.peer, ROOM, range(num_pages))
    print(msgspec.json.encode(admission.offer).decode(), flush=True)
    for _ in sys.stdin:
        print(digest(memory), flush=True)
    listener.close()


def digest(memory: torch.Tensor) -> str:
    return hashlib.blake2b(memory.cpu().numpy().data).hexdigest()


def seconds(call: Callable[[], object]) -> float:
    """Return the time of a call, including the work that it leaves on the devices."""
    torch.cuda.synchronize("cuda:0")
    begin = time.perf_counter()
    call()
    for device in {"cuda:0", far_device()}:
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def run(size_bytes: int, num_rounds: int) -> dict[str, float]:
    """Return the median GB/s of every case."""
    pool_bytes = 2 * size_bytes
    source = torch.randint(0, 256, (pool_bytes,), dtype=torch.uint8, device="cuda:0")
    expected = torch.zeros(pool_bytes, dtype=torch.uint8, device=far_device())
    command = [sys.executable, "-m", "benchmarks.gpu.cuda_ipc", "--listen", str(pool_bytes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        offer = msgspec.json.decode(child.stdout.readline(), type=TransportOffer)
        connection = CudaIpcTransport().connect(offer, DeviceRegion(source))
        plans = make_plans(size_bytes, pool_bytes) | make_tp_plans(size_bytes, pool_bytes)
        cases: dict[str, Callable[[], object]] = {
            name: partial(connection.write, ROOM, plan) for name, plan in plans.items()
        }
        cases["device copy"] = partial(expected[:size_bytes].copy_, source[:size_bytes])
        took: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(num_rounds + 1):
            for name, case in cases.items():
                took[name].append(seconds(case))
        for plan in plans.values():
            for begin, to, size in plan.copies():
                expected[to : to + size] = source[begin : begin + size]
        child.stdin.write("hash\n")
        child.stdin.flush()
        assert child.stdout.readline().strip() == digest(expected), (
            "the received bytes differ from the sent bytes"
        )
        connection.close()
    # The first round warms up.
    moved = {name: plan.total_bytes for name, plan in plans.items()} | {"device copy": size_bytes}
    return {name: moved[name] / statistics.median(took[name][1:]) / 1e9 for name in cases}


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = parser_of("gpu.cuda_ipc", "Compare `cuda_ipc` with torch's copy on the same devices.")
    parser.add_argument("--size-mib", type=int, default=1024, help="data per round in MiB")
    parser.add_argument("--rounds", type=int, default=15, help="rounds per case")
    parser.add_argument("--listen", type=int, metavar="BYTES", help=argparse.SUPPRESS)
    args = parse(parser, {"size_mib": 64, "rounds": 3}, child_options=("listen",))
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU, but torch finds none.", file=sys.stderr)
        return 2
    if args.listen:
        listen(args.listen)
        return 0
    print(f"{torch.cuda.get_device_name()}, cuda:0 to {far_device()}, torch {torch.__version__}")
    rates = run(args.size_mib << 20, args.rounds)
    for name, gigabytes_per_s in rates.items():
        print(f"{name:>12}  {gigabytes_per_s:8.1f} GB/s")
    print(result("cuda_ipc_vs_device_copy", rates["contiguous"] / rates["device copy"], GOAL))
    return 0


if __name__ == "__main__":
    sys.exit(main())
