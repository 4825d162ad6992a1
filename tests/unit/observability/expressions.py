"""The PromQL expressions of dashboards and alerts, and the series and labels they use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

ROOT = Path(__file__).parents[3] / "observability"
ALERTS = ROOT / "prometheus" / "alerts.yaml"


@dataclass(frozen=True)
class Expression:
    where: str
    promql: str


def alert_expressions() -> list[Expression]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [Expression(f"alert {rule['alert']}", rule["expr"]) for group in groups for rule in group["rules"]]


VARIABLE = re.compile(r"\$(?!__)\w+")


def expanded(promql: str) -> str:
    """The query that Grafana sends with all variables at "All" and a rate interval of one minute."""
    return VARIABLE.sub(".*", promql.replace("$__rate_interval", "1m"))


DASHBOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "grafana" / "dashboards").glob("*.json"))
}


def dashboard_expressions() -> list[Expression]:
    return [
        Expression(f"{name}: {panel['title']}", expanded(target["expr"]))
        for name, page in DASHBOARDS.items()
        for panel in page["panels"]
        for target in panel["targets"]
    ]


def selectors(promql: str) -> Iterator[promql_parser.VectorSelector]:
    """Each series selector in an expression."""
    return _selectors(promql_parser.parse(promql))


def _selectors(node: Any) -> Iterator[promql_parser.VectorSelector]:
    if isinstance(node, promql_parser.VectorSelector):
        yield node
        return
    for name in ("lhs", "rhs", "expr", "param", "vector_selector", "args"):
        child = getattr(node, name, None)
        for each in child if isinstance(child, list) else [child]:
            if each is not None:
                yield from _selectors(each)


def grouped_labels(promql: str) -> Iterator[str]:
    """Each label that an expression aggregates by or matches on."""
    return _grouped(promql_parser.parse(promql))


def _grouped(node: Any) -> Iterator[str]:
    modifier = getattr(node, "modifier", None)
    if isinstance(modifier, promql_parser.AggModifier):
        yield from modifier.labels
    elif modifier is not None and modifier.matching is not None:
        yield from modifier.matching.labels
    for name in ("lhs", "rhs", "expr", "param", "args"):
        child = getattr(node, name, None)
        for each in child if isinstance(child, list) else [child]:
            if each is not None:
                yield from _grouped(each)


COMPARISONS = {"==", "!=", ">", "<", ">=", "<="}


def operands(promql: str) -> list[str]:
    """The operands of an alert's comparisons and set operators; they have values even while the alert does not fire."""
    return list(_operands(promql_parser.parse(promql)))


def _operands(node: Any) -> Iterator[str]:
    if isinstance(node, promql_parser.ParenExpr):
        yield from _operands(node.expr)
    elif isinstance(node, promql_parser.Call) and node.func.name == "absent":
        yield from _operands(node.args[0])
    elif isinstance(node, promql_parser.BinaryExpr) and str(node.op) in COMPARISONS | {"and", "or", "unless"}:
        for side in (node.lhs, node.rhs):
            if not isinstance(side, promql_parser.NumberLiteral):
                yield from _operands(side)
    else:
        yield node.prettify()
