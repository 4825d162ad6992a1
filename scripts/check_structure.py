"""Checks that the pure modules stay pure and that no module lies unused; part of `make check`.

A pure module decides and does nothing else: it imports only the modules named below and other pure ones, awaits
nothing, opens nothing and changes no global. Which layer and which third party a module may import is checked by
import-linter and ruff (see pyproject.toml).
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("shared", "services", "connector", "replay")
PURE = {
    "connector": "messages",
    "connector.holder": "*",
    "connector.layout": "routes tensors",
    "connector.reader": "fetch lease_request peers prefetch reader speed_test",
    "connector.scheduler": "exchange_core",
    "services.collector": "aggregated_estimate disaggregation_report",
    "services.collector.console": "events health requests state tables traffic views",
    "services.collector.metrics": "fleet_metrics windows",
    "services.launcher.cluster": "folder",
    "services.launcher.doctor": "findings installation services workers",
    "services.launcher.fleet": "fleet_file",
    "services.launcher.service_files": "host_services systemd",
    "services.launcher.system": "devices options plan process_plan",
    "services.launcher.views": "watch",
    "services.orchestrator": "lifecycle sleeper",
    "services.orchestrator.planner": "change family planner rules work",
    "services.router.admission": "admission fair_share queues",
    "services.router.auth": "api_keys rate_limit",
    "services.router.batches": "lines",
    "services.router.placement": (
        "assembly compiled cost decision evaluation form kv_sources media placement placer policy "
        "request_fields revisions sequences shortlist slo"
    ),
    "services.router.relay": "failure_policy migration",
    "services.router.responses": "history",
    "services.router.state": (
        "block_table cluster_view fleet_table prefix_index quarantine reservations worker_speeds worker_view"
    ),
    "services.router.telemetry": "outcome ttft",
    "services.router.tokenize": "block_hash",
    "services.worker.engines": "store",
    "services.worker.engines.attached": "bodies",
    "services.worker.engines.simulated.core": "*",
    "services.worker.engines.store": "kv_exchange records tiers",
    "services.worker.legs": "body resume",
    "services.worker.lifecycle": "self_test",
    "shared.engine_speed": "*",
    "shared.text": "*",
}
"""By package: its pure modules; ``*`` stands for all of them, with the package itself and what lies below it."""
IMPORTS_ALLOWED = {
    "__future__", "array", "bisect", "cbor2", "collections", "dataclasses", "difflib", "enum", "functools", "hashlib",
    "heapq", "itertools", "json", "math", "msgspec", "numpy", "operator", "re", "statistics", "struct", "tomllib",
    "typing", "zlib",
}  # fmt: skip
ALSO_ALLOWED = ("shared.contracts.", "services.router.native.")
CALLS_FORBIDDEN = {"open", "print", "input", "exec", "eval", "__import__"}


@dataclass(frozen=True)
class Module:
    name: str
    path: str
    text: str
    tree: ast.Module

    def imports(self) -> Iterator[tuple[str, int]]:
        """Each imported module and each name imported from one, with its line."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def main() -> int:
    modules = read_modules()
    problems = [*unknown_pure_modules(modules), *impurities(modules), *unused_modules(modules)]
    print("\n".join(problems) or f"{len(modules)} modules, {sum(map(is_pure, modules))} of them pure")
    return 1 if problems else 0


def read_modules() -> dict[str, Module]:
    """All modules of the product, by their names."""
    modules = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        relative, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        name = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        modules[name] = Module(name, relative, text, ast.parse(text))
    return modules


def is_pure(name: str) -> bool:
    package, _, module = name.rpartition(".")
    if module in PURE.get(package, "").split():
        return True
    return any(PURE.get(parent) == "*" for parent in (name, package))


def unknown_pure_modules(modules: dict[str, Module]) -> list[str]:
    """Rows of ``PURE`` that name no module: it was moved, and is not checked any more."""
    named = [
        package if names == "*" else f"{package}.{name}" for package, names in PURE.items() for name in names.split()
    ]
    return [f"scripts/check_structure.py: there is no module {name}" for name in named if name not in modules]


def impurities(modules: dict[str, Module]) -> Iterator[str]:
    """Imports and statements that a pure module must not have."""
    for module in modules.values():
        if not is_pure(module.name):
            continue
        for name, line in module.imports():
            if not (name.partition(".")[0] in IMPORTS_ALLOWED or name.startswith(ALSO_ALLOWED) or names_pure(name)):
                yield f"{module.path}:{line} imports {name}, but is a pure module"
        for node in ast.walk(module.tree):
            if isinstance(node, ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith | ast.Await | ast.Global):
                yield f"{module.path}:{node.lineno} has {type(node).__name__}, but is a pure module"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS_FORBIDDEN:
                yield f"{module.path}:{node.lineno} calls {node.func.id}, but is a pure module"


def names_pure(imported: str) -> bool:
    """Whether this is a pure module, or something in one."""
    return is_pure(imported) or is_pure(imported.rpartition(".")[0])


def unused_modules(modules: dict[str, Module]) -> Iterator[str]:
    """Modules that no other imports, names in a string (``python -m``, plugins) or runs as a command."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    commands = [project["scripts"], *project["entry-points"].values()]
    used = {command.partition(":")[0] for group in commands for command in group.values()}
    for module in modules.values():
        for name, _line in module.imports():
            used |= {name, name.rpartition(".")[0]} - {module.name}
    everything = "\n".join(module.text for module in modules.values())
    for module in modules.values():
        runs = module.path.endswith(("__init__.py", "__main__.py")) or 'if __name__ == "__main__"' in module.text
        if not (runs or module.name in used or re.search(rf'"{re.escape(module.name)}[":.]', everything)):
            yield f"{module.path} is imported by no module"


if __name__ == "__main__":
    sys.exit(main())
