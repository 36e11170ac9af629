"""The network of these tests: a bridge with an address for each pod, in a network namespace of their own.

```
 test namespace:  bridge 10.244.0.1 ── veth ── pod namespace 10.244.0.2
    API server, tests, probes   │  └── veth ── pod namespace 10.244.0.3
                                └ services (10.96.0.0/16) are rewritten to a ready pod's address, as kube-proxy does
```
"""

import subprocess

GATEWAY = "10.244.0.1"
SERVICE_RANGE = "10.96.0.0/16"
BRIDGE = "pods"
CHAIN = "SERVICES"


def run(*argv: str, text: str | None = None) -> None:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"


def make_network() -> None:
    """Make the bridge. The namespace must be new: `scripts/kubernetes/test` makes one."""
    links = subprocess.run(
        ["ip", "-oneline", "link"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(links) == 1, (
        "these tests want a network namespace of their own: make test-kubernetes"
    )
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "address", "add", f"{GATEWAY}/16", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    run("ip", "route", "add", SERVICE_RANGE, "dev", BRIDGE)
    run("sysctl", "-qw", "net.ipv4.ip_forward=1")
    nat = ("iptables", "--table", "nat")
    run(*nat, "--new-chain", CHAIN)
    run(*nat, "--append", "PREROUTING", "--jump", CHAIN)
    run(*nat, "--append", "OUTPUT", "--jump", CHAIN)
    # Pods are neighbours: without this, answers would not come back the way the question went.
    translated = ("--match", "conntrack", "--ctstate", "DNAT")
    run(*nat, "--append", "POSTROUTING", *translated, "--jump", "MASQUERADE")


def join(pid: int, address: str) -> None:
    """Give the network namespace of a process an address on the bridge."""
    outer = f"pod{pid}"
    run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    run("ip", "link", "set", outer, "master", BRIDGE, "up")
    inside = ("nsenter", "--target", str(pid), "--net", "ip")
    run(*inside, "link", "set", "lo", "up")
    run(*inside, "address", "add", f"{address}/16", "dev", "eth0")
    run(*inside, "link", "set", "eth0", "up")
    run(*inside, "route", "add", "default", "via", GATEWAY)


def rules(services: list[dict], endpoints: list[dict]) -> str:
    """Return the rules that send what is new for a service to one of its ready pods, evenly."""
    by_name = {_name(one): one.get("subsets") or [] for one in endpoints}
    lines = ["*nat", f":{CHAIN} - [0:0]"]
    for service in services:
        address = service["spec"].get("clusterIP", "None")
        if address == "None":
            continue
        for port in service["spec"]["ports"]:
            ready = _ready(by_name.get(_name(service), []), port.get("name"))
            lines += _choices(address, port["port"], ready)
    return "\n".join([*lines, "COMMIT", ""])


def _choices(address: str, port: int, ready: list[str]) -> list[str]:
    rule = f"-A {CHAIN} -d {address} -p tcp --dport {port}"
    share = "-m statistic --mode random --probability"
    return [
        f"{rule} {share} {1 / (len(ready) - index):.6f} -j DNAT --to-destination {target}"
        for index, target in enumerate(ready)
    ]


def _name(one: dict) -> tuple[str, str]:
    return one["metadata"]["namespace"], one["metadata"]["name"]


def _ready(subsets: list[dict], name: str | None) -> list[str]:
    return [
        f"{address['ip']}:{port['port']}"
        for subset in subsets
        for address in subset.get("addresses") or []
        for port in subset["ports"]
        if port.get("name") == name
    ]


def apply(text: str) -> None:
    """Put the rules in the place of those before, at once."""
    run("iptables-restore", "--noflush", text=text)
