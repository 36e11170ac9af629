"""A real Prometheus that scrapes a cluster once a second, on loopback."""

import contextlib
import json
import math
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import yaml

from tandem.cli.up import free_ports
from tests.deploy.metrics_page import ALERTS
from tests.patience import PATIENCE_S, eventually

START_TIMEOUT_S = 600


class PrometheusServer:
    """Asks one that runs."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **params: object) -> dict:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(params)}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return json.loads(error.read())

    def samples_over(self, query: str, seconds: float) -> list[float]:
        """Every value, of all series, that a graph of the last `seconds` draws; NaN is none.

        Raises:
            ValueError: It is no expression that Prometheus understands.
        """
        now = time.time()
        answer = self.get("query_range", query=query, start=now - seconds, end=now, step=1)
        if answer["status"] != "success":
            raise ValueError(answer["error"])
        values = [float(v) for one in answer["data"]["result"] for _, v in one["values"]]
        return [value for value in values if not math.isnan(value)]

    def targets(self) -> dict[str, str]:
        """Health of each target, by its address."""
        active = self.get("targets", state="active")["data"]["activeTargets"]
        return {target["labels"]["instance"]: target["health"] for target in active}

    def rules(self) -> list[dict]:
        groups = self.get("rules")["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


@contextlib.contextmanager
def running_prometheus(
    directory: Path, targets: dict[str, list[str]]
) -> Iterator[PrometheusServer]:
    """Start one with our rules, and a job for each role; stop it at the end."""
    (port,) = free_ports(1)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [
            {
                "job_name": f"tandem-{role}",
                "static_configs": [{"targets": [url.removeprefix("http://") for url in urls]}],
            }
            for role, urls in targets.items()
        ],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    with (directory / "prometheus.log").open("w+") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={directory}/prometheus.yml",
                f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_ready(f"http://127.0.0.1:{port}", process, log.name)
            yield PrometheusServer(f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def _wait_ready(url: str, process: subprocess.Popen, log: str) -> None:
    def is_ready() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=5):
            return True
        assert process.poll() is None, f"Prometheus ended:\n{Path(log).read_text()}"
        return False

    is_started = eventually(is_ready, within_s=START_TIMEOUT_S)
    assert is_started, f"Prometheus did not start:\n{Path(log).read_text()}"
