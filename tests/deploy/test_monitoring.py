"""Dashboard, alert rules and chart use documented metrics; each alert has a runbook and a test."""

import re
from itertools import pairwise

import pytest

from tests.deploy.metrics_page import (
    ALERT_TESTS,
    RECORDED,
    ROOT,
    alerts,
    dashboard,
    documented,
    metrics_in,
    panel_queries,
    panels,
    recorded,
    rules,
)

OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
CHART = [
    path
    for path in (ROOT / "deploy" / "helm").rglob("*")
    if path.is_file() and path.suffix in {".yaml", ".tpl", ".json"}
]
# In the chart's own files other things begin with `tandem_`, too.
LIKE_A_METRIC = re.compile(r"\btandem_(?:edge|router|requests|pages|queued|push|step|node)_?\w*\b")


def test_panels_query_documented_metrics():
    for title, query in panel_queries():
        assert metrics_in(query) <= set(documented()), title
        assert set(RECORDED.findall(query)) <= set(recorded()), title
        assert "$" not in query, f"{title}: a variable that is not known"


def test_rules_query_documented_metrics():
    for rule in rules():
        assert metrics_in(rule["expr"]) <= set(documented()), rule
        assert set(RECORDED.findall(rule["expr"])) <= set(recorded()), rule


def test_the_chart_uses_documented_metrics():
    named = {
        name for path in CHART for name in LIKE_A_METRIC.findall(path.read_text(errors="replace"))
    }
    assert {found for name in named for found in metrics_in(name)} <= set(documented())


@pytest.mark.parametrize("alert", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_has_a_summary_and_a_runbook(alert):
    notes = alert["annotations"]
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    assert notes["summary"].endswith(".")
    assert notes["description"].endswith(".")
    assert notes["runbook_url"] == f"docs/operations.md#{alert['alert'].lower()}"
    _, _, section = OPERATIONS.partition(f"\n### {alert['alert']}\n")
    text = section.partition("\n### ")[0]
    assert len(text.split()) > 20, "a runbook that says nothing"


def test_each_runbook_has_an_alert():
    _, _, runbooks = OPERATIONS.partition("\n## Runbooks\n")
    sections = re.findall(r"^### (\w+)$", runbooks.partition("\n## ")[0], re.MULTILINE)
    assert sorted(sections) == sorted(alert["alert"] for alert in alerts())


def test_links_between_runbooks_resolve():
    heads = re.findall(r"^#+ (.+)$", OPERATIONS, re.MULTILINE)
    anchors = {head.lower().replace(" ", "-") for head in heads}
    assert set(re.findall(r"\]\(#([\w-]+)\)", OPERATIONS)) <= anchors


def test_runbooks_name_existing_log_events():
    _, _, runbooks = OPERATIONS.partition("\n## Runbooks\n")
    named = set(re.findall(r"`([a-z_]+\.[a-z_]+)`", runbooks))
    code = "".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    assert {name for name in named if f'"{name}"' not in code} == set()


def test_each_recording_rule_is_documented():
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert [name for name in recorded() if f"`{name}`" not in page] == []


def test_each_alert_has_a_firing_and_a_silent_test():
    tests = ALERT_TESTS.read_text()
    for alert in alerts():
        assert f"name: {alert['alert']} fires," in tests.replace("'", ""), alert["alert"]
        assert f"name: {alert['alert']} is silent," in tests.replace("'", ""), alert["alert"]


def test_the_datasource_of_the_dashboard_is_a_variable():
    variables = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert {"router", "role", "instance"} <= set(variables)
    for panel in panels():
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_each_panel_has_a_description_and_a_unit():
    for panel in panels():
        assert panel["description"].endswith("."), panel["title"]
        is_drawn = panel["type"] in {"timeseries", "stat"}
        assert not is_drawn or panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert [target["refId"] for target in panel["targets"]] == sorted(
            {target["refId"] for target in panel["targets"]}
        )


def test_panel_ids_are_unique_and_panels_do_not_overlap():
    shown = dashboard()["panels"]
    assert len({panel["id"] for panel in shown}) == len(shown)
    cells = [
        (x, y)
        for panel in shown
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23


def test_each_dashboard_row_has_panels():
    kinds = [panel["type"] for panel in dashboard()["panels"]]
    assert kinds[0] == "row"
    assert ("row", "row") not in pairwise([*kinds, "row"])
