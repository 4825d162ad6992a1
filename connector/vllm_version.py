"""The versions of vLLM that Baton supports.

The connector, its schedulers and the vLLM engine of the worker use interfaces that vLLM may change without notice. With
another version they might fail late, or hand over wrong KV; so an engine of another version does not start.
``tests/unit/connector/test_vllm_interfaces.py`` lists the interfaces, docs/vllm.md says how to move to another version.
"""

from __future__ import annotations

from connector.layout.engine_layout import UnsupportedEngine

SUPPORTED = ("0.32",)
"""Release series, each with all its patch releases."""


def check_version(version: str) -> None:
    """Raises UnsupportedEngine for a version that is not supported."""
    series = ".".join(version.split("+", maxsplit=1)[0].split(".")[:2])
    if series not in SUPPORTED:
        known = " and ".join(f"{one}.x" for one in SUPPORTED)
        raise UnsupportedEngine(
            f"Baton supports vLLM {known}, and this is vLLM {version}: install a supported version."
        )
