"""Starts `python -P -m MODULE` for Tandem's modules by forking a process that has already imported them.

A new node spends six CPU seconds on imports, and a fifth of a second on a tiny model. Each test process that starts
clusters has its own server: a single thread that imports, then forks on request. A forked process also forks the
Tandem processes that it starts (engines, ranks, edge workers), and executes everything else. Users start fresh
processes; the tests of commands do the same (`Process(..., is_fresh=True)`).

```
 test ── argv, environment, files, end of a link ───────▶ server ── fork ──▶ process
 test ◀── that link: its pid, then its exit status ──── server
```
"""

import asyncio
import atexit
import contextlib
import ctypes
import functools
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import thread as pools
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, Self, TextIO

# Imported before the first fork: 0.7 s.
ROUTER = ("tandem.router.command", "tandem.router.workers.worker", "tandem.router.workers.launcher")
# Imported before the first fork of a process other than a router: 5 s.
NODES = (
    *("tandem.node.command", "tandem.cli.serve", "tandem.cli.up", "tandem.cli.drain"),
    *("tandem.prefill.role", "tandem.decode.role", "tandem.node.process.rank_host"),
    *("tandem.node.ranks.model_engine", "tandem.node.process.engine_host"),
    *("tandem.tools.batch.command", "tandem.kvtransfer.transports.tcp"),
    *("tandem.kvtransfer.transports.shm", "xgrammar"),
    *("tandem.kvtier.disk", "tandem.kvtier.memory", "tandem.engine.attention.cpu"),
    *("transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2"),
    *("transformers.models.qwen3.modeling_qwen3", "tokenizers"),
    *(
        "transformers.tokenization_utils_tokenizers",
        "transformers.models.auto.tokenization_auto",
    ),
)
ROOT = Path(__file__).resolve().parents[1]
MAX_START_BYTES = 1 << 18
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
PR_SET_PDEATHSIG = 1
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
# A fork loses library threads. One thread is enough for tiny models.
SINGLE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_REAL_FORK_EXEC = subprocess._fork_exec
_REAL_CREATE = asyncio.create_subprocess_exec


# ── the tests' side ──────────────────────────────────────────────────────────────────────────────


class Forked:
    """A process that the server forked, with the part of `subprocess.Popen` that tests need.

    Args:
        argv: The words after `python -P -m`.
        stdin: File descriptor, DEVNULL or PIPE. For this and the next two, PIPE opens a pipe and sets
            the attribute of that name to its other end, a text file.
        stdout: File descriptor, DEVNULL or PIPE.
        stderr: File descriptor, DEVNULL or PIPE.
        cwd: The process's working directory.
        env: The process's environment; None: this process's.
        namespace: Path of the network namespace to enter; needs root.
        shared_memory: Directory to mount as the process's /dev/shm; needs root.
    """

    stdin: TextIO | None = None
    stdout: TextIO | None = None
    stderr: TextIO | None = None

    def __init__(
        self,
        argv: Sequence[str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int = 1,
        stderr: int = 2,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
        namespace: str = "",
        shared_memory: str = "",
    ) -> None:
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self.link, theirs = socket.socketpair()
        start = {
            "argv": list(argv),
            "cwd": str(cwd),
            "env": dict(os.environ if env is None else env),
        }
        start |= {"namespace": namespace, "shared_memory": shared_memory}
        with contextlib.ExitStack() as opened:
            opened.enter_context(theirs)
            given = enumerate((stdin, stdout, stderr))
            files = [theirs.fileno(), *(self._file(*each, opened) for each in given)]
            socket.send_fds(_server(), [json.dumps(start).encode()], files)
        self.pid = self._read_number()

    def _file(self, number: int, given: int, opened: contextlib.ExitStack) -> int:
        """Return the file descriptor that becomes the process's descriptor `number`."""
        if given == subprocess.DEVNULL:
            return opened.enter_context(Path(os.devnull).open("r+b", 0)).fileno()
        if given != subprocess.PIPE:
            return given
        reading, writing = os.pipe()
        ours, theirs = (writing, reading) if number == 0 else (reading, writing)
        opened.callback(os.close, theirs)
        name = ("stdin", "stdout", "stderr")[number]
        setattr(self, name, open(ours, "r" if number else "w"))  # noqa: SIM115 - `__exit__` closes it
        return theirs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pipes and wait for the process to end, as `subprocess` does."""
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):
                    file.close()
        self.wait()

    def _read_number(self) -> int:
        data = self.link.recv(4, socket.MSG_WAITALL)
        if len(data) < 4:
            raise RuntimeError("the fork server has ended: its output says why")
        return int.from_bytes(data, signed=True)

    def poll(self) -> int | None:
        """Return the exit status (negative: the signal that ended the process), or None while it runs."""
        with self._lock:
            if self.returncode is None and self._has_ended(0):
                self.returncode = self._read_number()
                self.link.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status and return it; raises `TimeoutExpired`."""
        deadline_s = time.monotonic() + (1e9 if timeout is None else timeout)
        while (status := self.poll()) is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0)
            with contextlib.suppress(ValueError):  # another thread has just read the status
                self._has_ended(left_s)
        return status

    def _has_ended(self, within_s: float) -> bool:
        with selectors.PollSelector() as selector:
            selector.register(self.link, selectors.EVENT_READ)
            return bool(selector.select(min(within_s, 1e6)))

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a module until it ends, like `subprocess.run` with `capture_output`."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        status = Forked(argv, stdout=out.fileno(), stderr=err.fileno()).wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(argv, status, out.read(), err.read())


class AsyncForked:
    """A process in an event loop: as much of `asyncio.subprocess.Process` as tests and the product need."""

    def __init__(
        self,
        popen: Forked | subprocess.Popen,
        stdin: asyncio.StreamWriter | None = None,
        stdout: asyncio.StreamReader | None = None,
        stderr: asyncio.StreamReader | None = None,
    ) -> None:
        self.pid, self.stdin, self.stdout, self.stderr = popen.pid, stdin, stdout, stderr
        self.returncode: int | None = None
        self._popen, self._ended = popen, asyncio.Event()
        self._pidfd = os.pidfd_open(popen.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._end)

    @classmethod
    async def start(cls, argv: Sequence[str]) -> Self:
        """Start a module; its standard error is `stderr`."""
        popen = Forked(argv, stderr=subprocess.PIPE)
        return cls(popen, stderr=await _reader(popen.stderr))

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.returncode = self._popen.wait()
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    async def communicate(self) -> tuple[None, bytes]:
        """Return what it still writes, once it has ended."""
        assert self.stderr is not None
        said = await self.stderr.read()
        await self.wait()
        return None, said

    def send_signal(self, number: int) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        self._popen.send_signal(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


async def _reader(pipe: Any, limit: int = 2**16) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=limit)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    return reader


@functools.cache
def _server() -> socket.socket:
    """Return the link to this process's server; the first call starts it, and closing the link ends it."""
    link, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-P", __file__, str(theirs.fileno())]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=os.environ | SINGLE
        )

    def stop() -> None:
        link.close()
        process.wait()

    atexit.register(stop)
    return link


# ── the server ───────────────────────────────────────────────────────────────────────────────────


def serve(tests: socket.socket) -> None:
    """Fork the requested processes until the tests close the link."""
    selector = selectors.DefaultSelector()
    selector.register(tests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data is None:
                message, files, *_ = socket.recv_fds(tests, MAX_START_BYTES, 4)
                if not message:
                    return
                link = socket.socket(fileno=files.pop(0))
                start = json.loads(message)
                if start["argv"][0] != "tandem.router":
                    _preload(NODES)
                pid = _fork(start, files)
                link.sendall(pid.to_bytes(4, signed=True))
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, link))
                continue
            selector.unregister(key.fd)
            os.close(key.fd)
            pid, link = key.data
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(OSError), link:  # the test may no longer wait
                link.sendall(status.to_bytes(4, signed=True))


def _fork(start: dict[str, Any], files: Sequence[int]) -> int:
    server = os.getpid()
    if not (pid := os.fork()):
        _end_with_the_server(server)
        _enter(start["namespace"], start["shared_memory"])
        _become(start["argv"], files, (), start["env"], start["cwd"])
    for file in files:
        os.close(file)
    return pid


def _end_with_the_server(server: int) -> None:
    """Have the kernel end this process with its server, so that a killed test run leaves no cluster."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)


def _enter(namespace: str, shared_memory: str) -> None:
    """Enter the given network namespace and mount the given shared memory, if specified."""
    libc = ctypes.CDLL(None)
    if namespace:
        with Path(namespace).open() as file:
            assert not libc.setns(file.fileno(), CLONE_NEWNET)
    if shared_memory:
        assert not libc.unshare(CLONE_NEWNS)
        assert not libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None)
        assert not libc.mount(shared_memory.encode(), b"/dev/shm", None, MS_BIND, None)


# ── a forked process ─────────────────────────────────────────────────────────────────────────────


def _become(
    argv: Sequence[str],
    files: Sequence[int],
    kept: Sequence[int],
    environment: Mapping[str, str],
    cwd: str | None,
) -> NoReturn:
    """Set up this process as if it was just executed, run a module, and exit.

    Args:
        argv: The module and its arguments.
        files: Descriptors that become stdin, stdout and stderr.
        kept: Other descriptors that stay open.
    """
    status = 1
    try:
        _forget()
        # Duplicate first, because the number of one may be the target of another.
        for number, file in enumerate([os.dup(file) for file in files]):
            os.dup2(file, number)
        # The numbers stay in use: libuv, of which the server has a copy, closes those of its pipe at each later fork.
        null = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/proc/self/fd"):
            if (number := int(name)) > 2 and number not in (null, *kept):
                os.dup2(null, number, inheritable=False)
        os.chdir(cwd or ".")
        os.environ.clear()
        os.environ.update(environment)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(  # noqa: SIM115
            2, "w", 1, errors="backslashreplace", closefd=False
        )
        _read_environment(environment)
        status = _run(argv)
    except BaseException:  # noqa: BLE001 - the top of a process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _forget() -> None:
    """Drop the inherited state that an executed process would not have."""
    gc.freeze()  # the parent's sockets are closed by number, not by the garbage collector
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio._set_running_loop(None)
    weakref.finalize._registry.clear()  # finalizers would remove the parent's temporary directories
    pools._threads_queues.clear()  # the exit would wait for the parent's threads
    sys.setswitchinterval(0.005)


def _read_environment(environment: Mapping[str, str]) -> None:
    """Apply environment variables as Python and libraries do at their start."""
    from prometheus_client import values

    places = [place for place in environment.get("PYTHONPATH", "").split(":") if place]
    sys.path[:0] = [place for place in places if place not in sys.path]
    values.ValueClass = values.get_value_class()


def _run(argv: Sequence[str]) -> int:
    module, *arguments = argv
    sys.argv = [module, *arguments]
    for name in (module, f"{module}.__main__"):
        sys.modules.pop(name, None)  # runpy creates a new instance
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
            return 1
        return int(end.code or 0)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
    return 0


def _is_ours(argv: Sequence[Any]) -> bool:
    words = [os.fsdecode(word) for word in argv[:4]]
    # Not forked: a conversion runs once, and needs modules of transformers that the server has not imported. A
    # download's library reads the environment when it is imported.
    is_fresh = words[3:] in (["tandem.node.models.checkpoint"], ["tandem.node.models.hub"])
    is_module = words[:3] == [sys.executable, "-P", "-m"] and words[3].startswith("tandem")
    return is_module and not is_fresh


def _fork_exec(
    argv: Sequence[Any],
    executables: Any,
    closes: bool,
    kept: Sequence[int],
    cwd: str | None,
    variables: Sequence[bytes] | None,
    stdin: int,
    p2cwrite: int,
    c2pread: int,
    stdout: int,
    errread: int,
    stderr: int,
    errpipe_read: int,
    errpipe: int,
    restores: bool,
    is_leader: bool,
    *more: Any,
) -> int:
    """Fork Tandem's modules; execute anything else. The signature is that of Python 3.11 to 3.13."""
    if not _is_ours(argv):
        pipes = (stdin, p2cwrite, c2pread, stdout, errread, stderr, errpipe_read, errpipe)
        how = (executables, closes, kept, cwd, variables, *pipes, restores, is_leader)
        return _REAL_FORK_EXEC(argv, *how, *more)
    if pid := os.fork():
        return pid
    if is_leader:
        os.setsid()
    files = [given if given >= 0 else own for own, given in enumerate((stdin, stdout, stderr))]
    environment = dict(os.environ)
    if variables is not None:
        pairs = (os.fsdecode(pair).partition("=") for pair in variables)
        environment = {name: value for name, _, value in pairs}
    words = [os.fsdecode(word) for word in argv[3:]]
    _become(words, files, [file for file in kept if file != errpipe], environment, cwd)


async def _create(
    *argv: Any, stdin=None, stdout=None, stderr=None, limit: int = 2**16, **how: Any
) -> Any:
    """Fork Tandem's modules, which uvloop would execute; execute anything else."""
    if not _is_ours(argv):
        pipes = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        return await _REAL_CREATE(*argv, **pipes, limit=limit, **how)
    popen = subprocess.Popen(  # noqa: ASYNC220 - a fork takes a hundredth of a second
        argv, stdin=stdin, stdout=stdout, stderr=stderr, **how
    )
    loop = asyncio.get_running_loop()
    reader = None if popen.stdout is None else await _reader(popen.stdout, limit)
    writer = None
    if popen.stdin is not None:
        flow = asyncio.streams.FlowControlMixin()
        transport, _ = await loop.connect_write_pipe(lambda: flow, popen.stdin)
        writer = asyncio.StreamWriter(transport, flow, None, loop)
    return AsyncForked(popen, writer, reader)


@functools.cache
def _preload(modules: Sequence[str]) -> None:
    gc.disable()
    for module in modules:
        import_module(module)
    gc.enable()
    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()


def main() -> None:
    """Import the modules, and run the server."""
    tests = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    sys.path.append(str(ROOT))  # processes of tests import `tests`
    _preload(ROUTER)
    subprocess._fork_exec = _fork_exec
    asyncio.create_subprocess_exec = _create
    serve(tests)
    os._exit(0)  # skip the teardown of modules


if __name__ == "__main__":
    main()
