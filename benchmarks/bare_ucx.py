"""The limit that `ucx` is held to: ucxx's core and nothing around it.

A child process posts a receive for each copy and tells over a pipe that it did; this one sends. One
message a copy; no tables, no grants, no batches. Options are those of the transport: ucxx's own
carry a third less over TCP.
"""

import base64
import select
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.ucx import OPTIONS

# isort: split
# After the transport, which tells UCX where to log before it is loaded.
import ucxx._lib.libucxx as ucx
from ucxx._lib.arr import Array

TAG = ucx.UCXXTag(1)


class _End:
    """A worker and what it takes to wait for requests of it."""

    def __init__(self) -> None:
        context = ucx.UCXContext(OPTIONS, (ucx.Feature.TAG, ucx.Feature.WAKEUP))
        self._worker = ucx.UCXWorker(
            context, enable_delayed_submission=False, enable_python_future=False
        )
        self._worker.init_blocking_progress_mode()
        self.address = base64.b64encode(self._worker.address.tobytes()).decode()

    def connect(self, address: str) -> None:
        peer = ucx.UCXAddress.create_from_buffer(base64.b64decode(address))
        self.endpoint = ucx.UCXEndpoint.create_from_worker_address(self._worker, peer, True)

    def finish(self, requests: Sequence[ucx.UCXRequest]) -> None:
        for request in requests:
            while not request.completed:
                self._worker.progress()
                if not request.completed and self._worker.arm():
                    select.select([self._worker.epoll_file_descriptor], [], [], 0.5)
            request.check_error()


class BareUcx:
    """Moves plans to a child process by ucxx alone."""

    def __init__(self, pool_bytes: int) -> None:
        self._end = _End()
        command = [sys.executable, "-m", "benchmarks.bare_ucx", str(pool_bytes)]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._say(self._end.address)
        self._end.connect(self._hear())
        self._far_cpu_s = 0.0

    def write(self, source: MemoryRegion, plan: CopyPlan) -> None:
        """Move a plan; return when all of it is there."""
        rows = [[to, size] for _, to, size in plan.copies()]
        self._say(msgspec.json.encode(rows).decode())
        self._hear()
        endpoint, view = self._end.endpoint, source.buffer
        self._end.finish(
            [
                endpoint.tag_send(Array(view[begin : begin + size]), TAG)
                for begin, _, size in plan.copies()
            ]
        )
        self._far_cpu_s = float(self._hear())

    def cpu_s(self) -> float:
        """Return the CPU seconds that the child had used when it last had everything."""
        return self._far_cpu_s

    def close(self) -> None:
        """End the child."""
        self._child.communicate()

    def _say(self, line: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()

    def _hear(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline().strip()


def receive(pool_bytes: int) -> None:
    """Be the child until the pipe ends."""
    end = _End()
    end.connect(sys.stdin.readline())
    print(end.address, flush=True)
    with MemoryRegion.private(pool_bytes) as region:
        view = region.buffer
        for line in sys.stdin:
            rows = msgspec.json.decode(line, type=list[tuple[int, int]])
            requests = [
                end.endpoint.tag_recv(Array(view[to : to + size]), TAG) for to, size in rows
            ]
            print("posted", flush=True)
            end.finish(requests)
            print(time.process_time(), flush=True)


if __name__ == "__main__":
    receive(int(sys.argv[1]))
