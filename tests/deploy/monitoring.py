"""The expressions of the rules and of the dashboard, and what they select."""

import json
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/prometheus"
DASHBOARD = json.loads((ROOT / "deploy/grafana/tessera.json").read_text())
_OPERATORS = {"or", "and", "unless"}
# What is no metric: label lists, ranges and the names of functions; then a metric with its label matchers.
_TOKEN = re.compile(
    r"(?:\b(?:sum|min|max|avg|count)\s+)?\b(?:by|without|on|ignoring)\s*\([^)]*\)|\[[^\]]*\]|\b[a-z_]+\s*\("
    r"|(?<![\w.])(?P<name>[a-zA-Z_][\w:]*)(?:\{(?P<matchers>[^}]*)\})?"
)
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"([^\"]*)\"")
_VARIABLES = {"$__rate_interval": "5m", "$instance": ".*"}


def rules(name):
    """Return the rules of a file."""
    return [r for g in yaml.safe_load((FOLDER / name).read_text())["groups"] for r in g["rules"]]


def dashboard_expressions():
    """Return the expressions of all panels, with values for Grafana's variables."""
    expressions = [t["expr"] for panel in DASHBOARD["panels"] for t in panel.get("targets", ())]
    for name, value in _VARIABLES.items():
        expressions = [expression.replace(name, value) for expression in expressions]
    return expressions


def all_expressions():
    """Return the expressions of the recording rules, the alerts and the dashboard."""
    recorded = [rule["expr"] for name in ("recording.yml", "alerts.yml") for rule in rules(name)]
    return recorded + dashboard_expressions()


def selectors(expression):
    """Return the metrics that an expression selects, each with the labels and values of its matchers."""
    return [
        (token["name"], _MATCHER.findall(token["matchers"] or ""))
        for token in _TOKEN.finditer(expression)
        if token["name"] and token["name"] not in _OPERATORS
    ]
