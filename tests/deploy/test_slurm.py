"""The SLURM job on this machine: `srun` starts its command here, and each machine is a loopback address."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from contextlib import contextmanager

import pytest

from tandem.up import free_ports
from tests.deploy.commands import ROOT
from tests.e2e.cluster import ask, eventually
from tests.patience import PATIENCE_S

SCRIPT = ROOT / "deploy/slurm/tandem.sbatch"
MACHINES = ("127.88.7.1", "127.88.7.2", "127.88.7.3")
NUM_NEW = 100
SRUN = """\
#!/usr/bin/env bash
# Runs one task here; a signal to srun reaches its task, as SLURM forwards it.
while [[ $1 == --* ]]; do
  if [[ $1 == --output=* ]]; then log=${1#*=}; fi
  shift
done
exec "$@" >"$log" 2>&1 </dev/null
"""
SCONTROL = """\
#!/usr/bin/env bash
[[ "$1 $2" == "show hostnames" ]] && tr , '\\n' <<<"$3"
"""


@pytest.fixture
def programs(tmp_path):
    """A directory of programs, the first on the path of jobs."""
    directory = tmp_path / "bin"
    directory.mkdir()
    write_program(directory / "srun", SRUN)
    write_program(directory / "scontrol", SCONTROL)
    return directory


def write_program(path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@contextmanager
def job(programs, machines=MACHINES, **settings: str):
    """Run the script as SLURM's batch step; yield it and the directory of its logs."""
    directory = programs.parent / "run"
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": ",".join(machines),
        "TANDEM_RUN_DIR": str(directory),
        "TANDEM_LISTEN": "machine",
        **settings,
    }
    environment.pop("TANDEM_CLUSTER_KEY", None)
    process = subprocess.Popen(
        [SCRIPT],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield process, directory
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=600)


def num_streamed(url: str, began: threading.Event) -> int:
    body = {"text": "Ceci n'est pas", "max_new_tokens": NUM_NEW, "stream": True}
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    last = b""
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                began.set()
                last = line
    return json.loads(last[len("data: ") :])["meta_info"]["completion_tokens"]


def is_whole(url: str) -> bool:
    """Tell whether the router has all nodes, each under the name of its machine."""
    try:
        nodes = ask(f"{url}/nodes")[1]["nodes"]
    except OSError:
        return False
    up = sorted(
        (node["role"], node["url"].split("/")[2].split(":")[0])
        for node in nodes
        if node["state"] == "up"
    )
    return up == [("decode", MACHINES[1]), ("prefill", MACHINES[0])]


@pytest.mark.slow
@pytest.mark.cluster
def test_a_job_serves_until_it_is_told_to_end_and_loses_no_stream(
    programs, tmp_path, embedded_model
):
    profile = tmp_path / "profile.json"
    profile.write_text('{"decode": {"base_ms": 15}}')
    router_port, node_port = free_ports(2)
    flags = f"--model {embedded_model} --engine simulated --sim-profile {profile} --max-total-tokens 8192"
    settings = {
        "TANDEM": f"{sys.executable} -P -m tandem",
        "TANDEM_NODE_FLAGS": flags,
        "TANDEM_PREFILL_FLAGS": "--bootstrap-port 0",
        "TANDEM_ROUTER_FLAGS": "--local-prefill-threshold 0",
        "TANDEM_ROUTER_PORT": str(router_port),
        "TANDEM_NODE_PORT": str(node_port),
    }
    with job(programs, MACHINES[:2], **settings) as (process, directory):
        url = f"http://{MACHINES[0]}:{router_port}"
        assert eventually(lambda: is_whole(url), within_s=600), logs(directory)
        key = directory / "cluster.key"
        assert key.stat().st_mode & 0o777 == 0o600
        assert len(key.read_text()) == 64

        began, streamed = threading.Event(), []
        client = threading.Thread(target=lambda: streamed.append(num_streamed(url, began)))
        client.start()
        assert began.wait(PATIENCE_S)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=600)
        client.join()
        assert (process.returncode, streamed) == (0, [NUM_NEW]), output + logs(directory)
        assert f"Tandem will be at {url}" in output
        assert {file.stem for file in directory.iterdir()} == {"router", "prefill-0", "decode-0"}


def logs(directory) -> str:
    return "\n".join(f"--- {file.name}\n{file.read_text()}" for file in directory.glob("*.log"))


def test_a_job_goes_on_without_a_node_that_is_lost_and_says_so_at_its_end(programs):
    # Roles that only live and end, longer than any test; the first decode is lost at once.
    write_program(
        programs / "tandem",
        '#!/usr/bin/env bash\n[[ $1 == decode && "$*" == *127.88.7.2* ]] && exit 3\nexec sleep 3600\n',
    )
    with job(programs) as (process, _):
        for line in process.stdout:
            if "decode-0 is lost" in line:
                break
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert "ending: the router finishes its streams" in output
        # `sleep` dies of the signal on which Tandem drains.
        assert "prefill-0 ended with status 143" in output
        assert "decode-0" not in output


def test_a_job_that_could_not_decode_is_refused(programs):
    with job(programs, TANDEM_PREFILLS="3") as (process, directory):
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 2
        assert "TANDEM_PREFILLS is 3 of 3 machines: give 1 to 2" in output
        assert not directory.exists()
