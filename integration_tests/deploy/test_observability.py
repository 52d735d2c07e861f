"""Alerts, dashboards and scrape files: Prometheus' own tool reads them, and they name only metrics that there are."""

import json
import re
import subprocess

import pytest
import yaml
from harness.processes import ROOT

HERE = ROOT / "deploy" / "observability"
DASHBOARDS = sorted((HERE / "grafana" / "dashboards").glob("*.json"))
SUFFIXES = ("_bucket", "_count", "_sum")


def promtool(tools, *arguments):
    done = subprocess.run([tools / "promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics_of(text):
    """Names of our metrics in a query, without the suffixes of histograms."""
    names = set(re.findall(r"\bheadrace_[a-z_]+\b", text))
    return {name.removesuffix(next((end for end in SUFFIXES if name.endswith(end)), "")) for name in names}


@pytest.fixture(scope="module")
def known():
    """Metrics that docs/metrics.md has; test_docs.py holds the page to the code."""
    return set(re.findall(r"^\| `(headrace_[a-z_]+)`", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))


def queries():
    for file in DASHBOARDS:
        board = json.loads(file.read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield f"{file.stem}: {panel['title']}", target["expr"]


def test_rules_and_queries_name_only_metrics_that_there_are(known):
    asked = {f"{place}: {query}": metrics_of(query) for place, query in queries()}
    asked["alerts"] = metrics_of((HERE / "alerts.yaml").read_text())
    assert len(known) > 15 and {place: names - known for place, names in asked.items() if names - known} == {}
    unseen = known - set().union(*asked.values())
    assert not unseen, f"no dashboard and no alert shows {unseen}"


def test_prometheus_reads_the_rules_the_scrape_file_and_every_query(tools, tmp_path):
    (tmp_path / "prometheus.yml").write_text(
        (HERE / "prometheus.yml").read_text().replace("/etc/prometheus/", f"{HERE}/")
    )
    promtool(tools, "check", "config", "--syntax-only", tmp_path / "prometheus.yml")
    promtool(tools, "check", "rules", HERE / "alerts.yaml")
    rules = [
        {"record": f"query:{number}", "expr": query.replace("$run", ".*")}
        for number, (_, query) in enumerate(queries())
    ]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "boards", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool(tools, "check", "rules", tmp_path / "queries.yaml")


def test_alerts_fire_at_what_they_are_for(tools):
    promtool(tools, "test", "rules", HERE / "alerts.test.yaml")


def test_dashboards_have_panels_apart_and_the_source_that_is_provisioned():
    sources = yaml.safe_load((HERE / "grafana/provisioning/datasources/headrace.yaml").read_text())
    uids = {source["uid"] for source in sources["datasources"]}
    for file in DASHBOARDS:
        board = json.loads(file.read_text())
        taken = set()
        for panel in board["panels"]:
            assert panel["datasource"]["uid"] in uids
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken and max(x for x, _ in cells) < 24, f"{file.stem}: {panel['title']}"
            taken |= cells
    assert len({json.loads(file.read_text())["uid"] for file in DASHBOARDS}) == len(DASHBOARDS) == 2
