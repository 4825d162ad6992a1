"""What NetworkPolicies permit within one namespace, by the rules of Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def allows(
    policies: Sequence[Mapping[str, Any]],
    source: Mapping[str, str],
    target: Mapping[str, str],
    port: str,
    named: Mapping[str, int],
) -> bool:
    """Whether a pod of these labels may connect to a port, by name, of another one with these ports."""
    outward = [each for each in policies if "Egress" in each["policyTypes"] and selects(each["podSelector"], source)]
    if outward and not any(
        _permits(rule, "to", target, port, named) for each in outward for rule in each.get("egress", ())
    ):
        return False
    inward = [each for each in policies if "Ingress" in each["policyTypes"] and selects(each["podSelector"], target)]
    return not inward or any(
        _permits(rule, "from", source, port, named) for each in inward for rule in each.get("ingress", ())
    )


def _permits(
    rule: Mapping[str, Any], peers: str, other: Mapping[str, str], port: str, named: Mapping[str, int]
) -> bool:
    """A rule without peers is for all, one without ports for all ports."""
    assert rule.keys() <= {peers, "ports"}
    is_peer = peers not in rule or any(selects(peer["podSelector"], other) for peer in rule[peers])
    return is_peer and ("ports" not in rule or any(each["port"] in (port, named.get(port)) for each in rule["ports"]))


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """An empty selector selects all."""
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
