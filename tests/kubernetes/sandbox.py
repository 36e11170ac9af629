"""One container as a container runtime runs it: its own processes, network, host name, root and user.

```
 Sandbox of a pod: holds network and host name ◀─ enters ─ Container: new processes and mounts
                                                            root: this machine's, read-only, writes go to memory
                                                                  /opt: the image's content
                                                                  volumes of the pod
```

There are no images: every container has this machine's files, this checkout and its Python.
"""

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.kubernetes.network import join

ROOT = Path(__file__).resolve().parents[2]
ENTRYPOINT = ("tandem",)
PACKAGES = sysconfig.get_path("purelib")
IMAGE_ENV = {
    "HOME": "/var/cache/tandem",
    "XDG_CACHE_HOME": "/var/cache/tandem",
    "PATH": "/opt/python/bin:/usr/local/bin:/usr/bin:/bin",
    "LD_LIBRARY_PATH": "/opt/python/lib",  # of a Python that has itself as a library
    "PYTHONPATH": "/opt/tandem/src:/opt/packages",
}
TANDEM = '#!/bin/sh\nexec /opt/python/bin/python3 -P -m tandem "$@"\n'

# Makes the root of a container and becomes its first process. Its arguments: scratch directory, user, group,
# whether the root may be written, then source and target of each mount, `--`, the command.
ENTER = """
set -e
scratch=$1 user=$2 group=$3 writable=$4; shift 4
mount --make-rprivate /
mount -t tmpfs tmpfs "$scratch"
mkdir "$scratch/upper" "$scratch/work" "$scratch/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$scratch/upper,workdir=$scratch/work" "$scratch/root"
root=$scratch/root
inside() { /usr/sbin/chroot "$root" "$@"; }
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t proc proc "$root/proc"
while [ "$1" != -- ]; do
  # Links of this machine, such as /var/run, lead to where they should only from inside.
  if [ -d "$1" ]; then inside mkdir -p "$2"; else inside mkdir -p "$(dirname "$2")"; inside touch "$2"; fi
  mount --bind "$1" "$root$(inside realpath "$2")"
  shift 2
done
shift
if [ "$writable" = no ]; then mount -o remount,bind,ro "$root"; fi
exec /usr/sbin/chroot "$root" setpriv --reuid="$user" --regid="$group" --groups="$group" \\
  --no-new-privs --bounding-set=-all --inh-caps=-all -- "$@"
"""


@dataclass(frozen=True, kw_only=True)
class ContainerPlan:
    """What a container is to be.

    Attributes:
        mounts: Path in the container → path here.
    """

    argv: list[str]
    env: dict[str, str]
    mounts: dict[str, Path] = field(default_factory=dict)
    user: int = 0
    group: int = 0
    is_root_writable: bool = True


class Sandbox:
    """The network and the host name that containers of one pod share."""

    def __init__(self, name: str, address: str) -> None:
        self.address = address
        self._holder = subprocess.Popen(
            [
                "unshare",
                "--net",
                "--uts",
                "sh",
                "-c",
                f"hostname {name}; echo; exec sleep infinity",
            ],
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        self._holder.stdout.readline()  # its namespaces are made
        join(self._holder.pid, address)

    @property
    def pid(self) -> int:
        return self._holder.pid

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
        if self._holder.stdout is not None:
            self._holder.stdout.close()


class Container:
    """One life of a container."""

    def __init__(self, sandbox: Sandbox, plan: ContainerPlan, log: Path) -> None:
        self._plan = plan
        scratch = Path(tempfile.mkdtemp(dir=log.parent))
        (scratch / "mount").mkdir()
        tandem = scratch / "tandem"
        tandem.write_text(TANDEM)
        tandem.chmod(0o755)
        mounts = {
            "/opt/tandem": ROOT,
            "/opt/packages": Path(PACKAGES),
            "/opt/python": Path(sys.base_prefix),
            "/usr/local/bin/tandem": tandem,
            **plan.mounts,
        }
        pairs = [str(part) for target, source in mounts.items() for part in (source, target)]
        writable = "yes" if plan.is_root_writable else "no"
        self.log = log
        with log.open("a") as out:
            self._process = subprocess.Popen(
                [
                    *("nsenter", "--target", str(sandbox.pid), "--net", "--uts"),
                    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER),
                    *("enter", str(scratch / "mount"), str(plan.user), str(plan.group), writable),
                    *(*pairs, "--", *plan.argv),
                ],
                env={**IMAGE_ENV, **plan.env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd="/",
            )

    def status(self) -> int | None:
        """Return the exit status; None while it runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Send a signal to its first process, while that is there."""
        pid = self._process.pid
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[:1]:
                os.kill(int(child), number)

    def stop(self, deadline: float) -> int:
        """Have it end, by force from a moment of the monotonic clock on; return its exit status."""
        self.signal(signal.SIGTERM)
        try:
            return self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        self.signal(signal.SIGKILL)
        self._process.kill()
        return self._process.wait()
