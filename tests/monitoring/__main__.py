"""`make test-monitoring`: rules, metrics and dashboard, held to Prometheus' own programs.

```
 promtool ── alerts.yaml, prometheus.yml, alerts_test.yaml, what each role answers at /metrics
 prometheus ── scrapes a simulated cluster under load ── every query of the dashboard draws something
                                                     └── every rule is evaluated; a lost decode raises an alert
```

Wants `promtool` and `prometheus`, which Debian's package `prometheus` brings.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.deploy.metrics_page import ALERT_TESTS, ALERTS, ROOT, panel_queries
from tests.e2e.cluster import Cluster, ask, running_cluster, running_serve
from tests.monitoring.server import PrometheusServer, running_prometheus
from tests.patience import eventually

LOAD_S = 25.0
NUM_CLIENTS = 12
PROFILE = '{"prefill": {"base_ms": 5, "per_token_ms": 0.2}, "decode": {"base_ms": 8}}'
NODE_FLAGS = (
    *("--engine", "simulated", "--page-size", "8", "--max-total-tokens", "16384"),
    *("--kv-tier", "host:64MiB", "--kv-tier-min-tokens", "32"),
)
# A few places and a short line, so that some are refused; some prompts are short enough for decode.
ROUTER_FLAGS = (
    *("--max-in-flight", "6", "--max-queued-requests", "3"),
    *("--local-prefill-threshold", "24"),
)


def main() -> int:
    """Run all checks; return the exit status."""
    missing = [name for name in ("promtool", "prometheus") if shutil.which(name) is None]
    if missing:
        print(f"{' and '.join(missing)} not found: install the package `prometheus`")
        return 2
    promtool("check", "rules", str(ALERTS))
    promtool("check", "config", str(ROOT / "deploy" / "prometheus" / "prometheus.yml"))
    promtool("test", "rules", str(ALERT_TESTS))
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        profile = directory / "profile.json"
        profile.write_text(PROFILE)
        flags = (*NODE_FLAGS, "--sim-profile", str(profile), "--log-level", "error")
        cluster = stack.enter_context(running_cluster(*flags, decodes=2, router_flags=ROUTER_FLAGS))
        serve = stack.enter_context(running_serve(*flags))
        roles = {
            "router": [cluster.url],
            "prefill": cluster.prefill_urls,
            "decode": cluster.decode_urls,
            "serve": [serve],
        }
        server = stack.enter_context(running_prometheus(directory, roles))
        load(cluster, serve)
        for role, urls in roles.items():
            promtool("check", "metrics", given=own_metrics(f"{urls[0]}/metrics"), what=role)
        check("every target is scraped", lambda: check_targets(server, 5))
        check("every query of the dashboard draws something", lambda: check_panels(server))
        check("every rule is evaluated, and no alert fires", lambda: check_rules(server))
        check("a cluster without decode raises an alert", lambda: check_alert(server, cluster))
    print("all of it holds")
    return 0


def promtool(*arguments: str, given: str | None = None, what: str = "") -> None:
    """Run promtool; end with what it says unless it is content, warnings included."""
    done = subprocess.run(
        ["promtool", *arguments], input=given, capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    if done.returncode or (given is not None and said.strip()):
        sys.exit(f"promtool {' '.join(arguments)} {what}:\n{said}")
    print(f"ok: promtool {' '.join(Path(a).name for a in arguments)} {what}")


def own_metrics(url: str) -> str:
    """Return the page without the gauges under SGLang's names, whose colons promtool refuses."""
    return "".join(line for line in ask(url)[1].splitlines(keepends=True) if "sglang:" not in line)


def check(what: str, run: Callable[[], str]) -> None:
    """Run a check, which returns what is wrong; end with that."""
    wrong = run()
    if wrong:
        sys.exit(f"FAILED: {what}\n{wrong}")
    print(f"ok: {what}")


def load(cluster: Cluster, serve: str) -> None:
    """Have clients ask for `LOAD_S`; in the middle one decode hands over what it has."""
    until = time.monotonic() + LOAD_S
    clients = [
        threading.Thread(target=ask_until, args=(until, serve if i == 0 else cluster.url, i))
        for i in range(NUM_CLIENTS)
    ]
    # Of one room the second is refused by the engine itself, which routers see to elsewhere.
    half = {"input_ids": [5] * 16, "bootstrap_host": "127.0.0.1", "bootstrap_room": 7}
    twins = [
        threading.Thread(target=post, args=(f"{cluster.prefill_urls[0]}/generate", half, 2.0))
        for _ in range(2)
    ]
    for client in (*twins, *clients):
        client.start()
    time.sleep(LOAD_S / 3)
    for order in ({"timeout_s": 0}, {"cancel": True}):
        post(f"{cluster.decode_urls[0]}/drain", order)
        time.sleep(2)
    for client in (*twins, *clients):
        client.join()


def ask_until(until: float, url: str, client: int) -> None:
    """Ask again and again; every third prompt is short, every fifth client leaves early."""
    number = 0
    while time.monotonic() < until:
        number += 1
        num_prompt = 16 if number % 3 == 0 else 120
        ids = [10 + (client * 31 + number * 7 + i) % 900 for i in range(num_prompt)]
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 40}, "stream": True}
        is_short_of_time = number % 5 == 0
        post(f"{url}/generate", body, 0.1 if is_short_of_time else 30.0)


def post(url: str, body: object, timeout_s: float = 30.0) -> None:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            response.read()
    except urllib.error.HTTPError as error:
        error.close()
        time.sleep(0.2)  # refused: a client that is told to wait does
    except (TimeoutError, urllib.error.URLError):
        pass


def check_targets(server: PrometheusServer, num: int) -> str:
    targets = server.targets()
    is_well = len(targets) == num and set(targets.values()) == {"up"}
    return "" if is_well else str(targets)


def check_panels(server: PrometheusServer) -> str:
    wrong = []
    for title, query in panel_queries():
        try:
            if not server.samples_over(query, LOAD_S + 10):
                wrong.append(f"{title}: nothing for {query}")
        except ValueError as error:
            wrong.append(f"{title}: {error}")
    return "\n".join(wrong)


def check_rules(server: PrometheusServer) -> str:
    rules = server.rules()
    wrong = [f"{rule['name']}: {rule['lastError']}" for rule in rules if rule["health"] != "ok"]
    wrong += [f"{rule['name']} fires" for rule in rules if rule.get("state") == "firing"]
    return "\n".join(wrong) if rules else "there are none"


def check_alert(server: PrometheusServer, cluster: Cluster) -> str:
    """Kill the decode nodes; the alert waits for a minute, so that it is pending is enough here."""
    for process in cluster.processes[1:3]:
        process.stop()

    def state() -> str:
        (rule,) = [rule for rule in server.rules() if rule["name"] == "TandemNoDecode"]
        return str(rule["state"])

    return "" if eventually(lambda: state() != "inactive") else f"it is {state()}"


if __name__ == "__main__":
    sys.exit(main())
