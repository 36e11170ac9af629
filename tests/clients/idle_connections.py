"""Opens thousands of connections that send nothing, half a head or half a body, beside one that works.

    python -m tests.clients.idle_connections [COUNT]

Starts the app over a fake backend in a process of its own and prints what a connection costs it in
memory, while a client that behaves is served. Exits with 1 if that one is ever refused.
"""

import asyncio
import contextlib
import json
import resource
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

SENT = {
    "nothing": b"",
    "half a head": b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 1000,
    "half a body": b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n"
    + b"a" * 1000,
    "idle after an answer": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
}


def resident_kib(pid: int) -> int:
    """Return the memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.split("VmRSS:")[1].split()[0])


def generate(url: str) -> bool:
    """Tell whether a good client is served."""
    body = json.dumps({"input_ids": [5, 6], "max_new_tokens": 2}).encode()
    with urllib.request.urlopen(f"{url}/generate", body, timeout=20) as answer:
        return json.load(answer)["output_ids"] == [5, 6]


async def main(count: int) -> bool:
    """Run all kinds one after the other; return whether the good client was always served."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.clients.fake_server"), stdout=asyncio.subprocess.PIPE
    )
    assert server.stdout is not None
    url = (await server.stdout.readline()).decode().strip()
    address = urlsplit(url).hostname, urlsplit(url).port
    is_served, before = generate(url), resident_kib(server.pid)
    for kind, data in SENT.items():
        writers = [await opened(address, data) for _ in range(count)]
        is_served &= await asyncio.to_thread(generate, url)
        cost = (resident_kib(server.pid) - before) / count
        said = f"{count} x {kind}: {cost:.1f} KiB each, others served: {is_served}\n"
        sys.stdout.write(said)
        for writer in writers:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
    server.terminate()
    await server.wait()
    return is_served


async def opened(address: tuple, data: bytes) -> asyncio.StreamWriter:
    """Open a connection and send what it ever will."""
    _, writer = await asyncio.open_connection(*address)
    writer.write(data)
    return writer


if __name__ == "__main__":
    sys.exit(not asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)))
