"""A running cluster tells its secrets to nobody: not to `ps`, not to a log, not over HTTP."""

import json
import secrets
import socket
import stat
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import pytest

from tandem.cli.up import free_ports
from tandem.wire.keys import ChannelKey, operator_key
from tests.e2e.cluster import running_cluster
from tests.patience import PATIENCE_S, eventually
from tests.processes import Process, children

SHM = Path("/dev/shm")


def ask(url: str, key: str = "", body: object = None) -> str:
    """Return all that an answer says, headers included, whatever its status."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return f"{answer.headers}{answer.read().decode()}"
    except urllib.error.HTTPError as error:
        with error:
            return f"{error.headers}{error.read().decode()}"


def say_nonsense(url: str) -> str:
    """Return the answer to what is no HTTP; it is logged as nothing that operators care for."""
    host, _, port = url.partition("://")[2].partition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as client:
        client.sendall(b"no http\r\n\r\n")
        return client.makefile("rb").read().decode()


def command_lines() -> str:
    """Return what `ps` shows anybody."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has just ended
    return "\n".join(lines)


def open_to_others(files: Iterable[Path]) -> list[Path]:
    """Return those that another user could look into."""
    return [path for path in files if path.lstat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)]


def shared_memory_of(pid: int) -> set[Path]:
    """Return the files that a process and its children have mapped: other tests make files there, too."""
    mapped = Path(f"/proc/{pid}/maps").read_text().split()
    files = {Path(word) for word in mapped if word.startswith(f"{SHM}/tandem-")}
    return files.union(*map(shared_memory_of, children(pid)))


@pytest.mark.slow
def test_no_secret_is_in_a_log_an_answer_a_command_line_or_a_file_of_others(tiny_model, tmp_path):
    secret, api_key = f"secret-{secrets.token_hex(16)}", f"key-{secrets.token_hex(16)}"
    channel = ChannelKey.from_secret(secret)
    derived = [channel.server_secret.decode(), channel.server_public.decode(), operator_key(secret)]
    keys, temporary = tmp_path / "keys", tmp_path / "temporary"
    temporary.mkdir()
    keys.write_text(api_key)
    keys.chmod(0o600)
    guarded = ("--api-key-file", str(keys), "--log-level", "debug")
    flags = ("--model", str(tiny_model("llama")), "--engine", "simulated", "--page-size", "8")
    with running_cluster(
        *(*flags, "--max-total-tokens", "4096", *guarded),
        env={"TANDEM_CLUSTER_KEY": secret, "TMPDIR": str(temporary)},
        router_flags=(*guarded, "--workers", "2"),
        is_fresh=True,  # a forked process shows the command line of its parent
    ) as cluster:
        said = []
        for url in (cluster.url, *cluster.prefill_urls, *cluster.decode_urls):
            for path in ("/server_info", "/metrics", "/health", "/v1/models", "/openapi.json"):
                said += [ask(url + path, api_key), ask(url + path, "wrong")]
            said.append(say_nonsense(url))
            said += [ask(f"{url}/generate", api_key, body) for body in ({}, [], {"input_ids": "x"})]
        good = {"input_ids": [5, 6, 7], "max_new_tokens": 3}
        served = ask(f"{cluster.url}/generate", api_key, good)
        assert "output_ids" in served, served
        shown = command_lines()
        assert str(keys) in shown, "the cluster's own command lines were looked at"
        assert list(temporary.iterdir())
        assert not open_to_others(temporary.iterdir())
        pools = set().union(*(shared_memory_of(each.pid) for each in cluster.processes))
        assert pools
        assert not open_to_others(pools)
        logs = [process.output() for process in cluster.processes]
    assert all("debug" in log for log in logs)
    for hidden in (secret, api_key, *derived):
        assert not [text for text in (*said, served, shown, *logs) if hidden in text]


@pytest.mark.slow
def test_a_router_with_another_secret_says_so_and_so_do_the_nodes(tiny_model):
    flags = ("--model", str(tiny_model("llama")), "--engine", "simulated", "--page-size", "8")
    with running_cluster(
        *(*flags, "--max-total-tokens", "4096"), env={"TANDEM_CLUSTER_KEY": "of the nodes"}
    ) as cluster:
        node, router = cluster.decode_urls[0], cluster.processes[-1]
        stranger = Process(
            *("lb", "--prefill", cluster.prefill_urls[0], "--decode", node),
            *("--port", str(free_ports(1)[0])),
            env={"TANDEM_CLUSTER_KEY": "of a stranger"},
        )
        try:
            told = "hung up during the handshake; most likely its TANDEM_CLUSTER_KEY"
            assert eventually(lambda: told in stranger.output()), stranger.output()
            assert "cluster_key.weak" in stranger.output()
            decode = cluster.processes[1]
            assert eventually(lambda: "different TANDEM_CLUSTER_KEY" in decode.output())
            assert eventually(lambda: strangers(node) > 0)
        finally:
            stranger.stop()
        assert router.is_running()


def strangers(url: str) -> float:
    lines = ask(f"{url}/metrics").splitlines()
    (line,) = [line for line in lines if line.startswith("tandem_strangers_total{")]
    return float(line.rpartition(" ")[2])
