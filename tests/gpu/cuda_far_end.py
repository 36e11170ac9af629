"""A pool on a GPU in a process of its own: CUDA opens no handle in the process that made it.

Prints its offer, then answers each line: `read` with the pool's bytes in hexadecimal, `fence` once its
peer is fenced and the pool is filled with 7.
"""

import sys

import msgspec
import torch

from tandem.kvtransfer.region import DeviceRegion
from tandem.kvtransfer.transports.base import Pool
from tandem.kvtransfer.transports.cuda_ipc import CudaIpcTransport
from tandem.wire.generation import Room

PAGE_BYTES, NUM_PAGES = 4096, 16


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    memory = torch.zeros(PAGE_BYTES * NUM_PAGES, dtype=torch.uint8, device="cuda:0")
    pool = Pool.packed(DeviceRegion(memory), PAGE_BYTES, NUM_PAGES)
    listener = CudaIpcTransport().listen(pool)
    admission = listener.admit("")
    listener.permit(admission.peer, Room(1), range(NUM_PAGES // 2))
    say(msgspec.json.encode(admission.offer).decode())
    for line in sys.stdin:
        if line == "fence\n":
            listener.fence(admission.peer)
            memory.fill_(7)
            torch.cuda.synchronize()
            say("fenced")
        else:
            say(memory.cpu().numpy().tobytes().hex())
    listener.close()


if __name__ == "__main__":
    main()
