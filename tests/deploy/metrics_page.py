"""docs/metrics.md and what else speaks of metrics, read."""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "metrics.md"
CHART = ROOT / "deploy" / "helm" / "tandem"
DASHBOARD = CHART / "dashboards" / "tandem.json"
ALERTS = CHART / "files" / "alerts.yaml"
ALERT_TESTS = ROOT / "tests" / "monitoring" / "alerts_test.yaml"
ROW = re.compile(r"^\| `((?:tandem_|process_|sglang:)\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)
NAME = re.compile(r"\b(?:tandem|process)_[a-z_]+\b")
RECORDED = re.compile(r"\btandem:[a-z_:0-9]+\b")
OF_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")
# What Grafana puts in, and what it is for a look from outside.
VARIABLES = {
    "$__rate_interval": "30s",
    "$router": ".*",
    "$model": ".*",
    "$instance": ".*",
    "$role": ".*",
}


@dataclass(frozen=True)
class Documented:
    """A row of the page. The name of a histogram is without `_bucket`, `_sum` and `_count`."""

    name: str
    type: str
    labels: frozenset[str]


@functools.cache
def documented() -> dict[str, Documented]:
    rows = ROW.findall(PAGE.read_text())
    return {
        name: Documented(name, kind, frozenset(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in rows
    }


def dashboard() -> dict:
    return json.loads(DASHBOARD.read_text())


def panels() -> list[dict]:
    """Those that draw something."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def panel_queries() -> list[tuple[str, str]]:
    """Title and expression of each query, with the variables filled in."""
    return [
        (panel["title"], filled(target["expr"]))
        for panel in panels()
        for target in panel["targets"]
    ]


def filled(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


@functools.cache
def rules() -> list[dict]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict]:
    return [rule for rule in rules() if "alert" in rule]


def recorded() -> list[str]:
    return [rule["record"] for rule in rules() if "record" in rule]


def metrics_in(text: str) -> set[str]:
    """Names of metrics in an expression, as the page has them."""
    known = documented()
    names = {name for name in NAME.findall(text) if name not in known}
    return {OF_HISTOGRAM.sub("", name) for name in names} | (set(NAME.findall(text)) & set(known))
