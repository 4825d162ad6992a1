"""Checks that pure modules are pure, that no module lies unused and that docstrings stand alone; part of `make check`.

A pure module decides and does nothing else: it imports only the modules named below and other pure ones, awaits
nothing, opens nothing and changes no global. Which layer and which third party a module may import is checked by
import-linter and ruff (see pyproject.toml). Lines of documents that are too long are refused, too.
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
    "connector": "groups messages",
    "connector.holder": "*",
    "connector.layout": "bounds routes tensors",
    "connector.reader": "fetch grant_test lease_request peers prefetch prefetched_blocks reader speed_test",
    "connector.scheduler": "exchange_core grant_ways recompute_share",
    "services.collector": "aggregated_estimate disaggregation_report",
    "services.collector.console": "events health requests state tables traffic views",
    "services.collector.metrics": "fleet_metrics windows",
    "services.launcher.cluster": "folder",
    "services.launcher.doctor": "findings installation services workers",
    "services.launcher.fleet": "fleet_file",
    "services.launcher.system": "devices options plan process_plan",
    "services.orchestrator": "lifecycle settings",
    "services.orchestrator.planner": "change family planner rules work",
    "services.router": "settings",
    "services.router.admission": "admission fair_share pacing policy queues",
    "services.router.auth": "api_keys",
    "services.router.batches": "lines",
    "services.router.decisions": "decision decision_filter odds",
    "services.router.placement": (
        "assembly candidates fleet kv_sources native placement placer policy revisions slo specification"
    ),
    "services.router.relay": "failure_policy migration",
    "services.router.request": "client facts fields form head mode model_name rate_limit sequences timings",
    "services.router.responses": "history",
    "services.router.state": (
        "block_table cluster_view fleet_table prefix_index quarantine reservations revision_names worker_speed "
        "worker_speeds worker_view"
    ),
    "services.router.telemetry": "outcome ttft",
    "services.router.tokenize": "block_hash",
    "services.worker.engines": "store",
    "services.worker.engines.attached": "bodies",
    "services.worker.engines.simulated.core": "*",
    "services.worker.engines.store": "kv_exchange port records slots tiers",
    "services.worker.kv_exchange": "link_share",
    "services.worker.legs": "body resume",
    "shared": "addresses bounded loopback",
    "shared.engine_speed": "*",
    "shared.http": "errors",
    "shared.text": "*",
}
"""By package: its pure modules; ``*`` stands for all of them, with the package itself and what lies below it."""
PURE_PARTS = {
    "services.collector.console.orders": "parse_order refusal_of",
    "services.launcher.system.children": "RestartHistory why_it_died",
    "services.orchestrator.sleeping": "Sleeper",
    "services.router.usage": "UnstoredUsage",
    "services.worker.kv_exchange.peers": "PeerTable",
    "services.worker.lifecycle.self_test": (
        "Attempt as_text check_report compare next_partner outcome_of partners pause_s prompt_tokens worst"
    ),
    "services.worker.kv_events": "EventTranslation HeldBlocks blocks_of_windows narrow_windows",
}
"""By module: its pure classes and functions. What they use of their module, and import, is pure, too."""
IMPORTS_ALLOWED = {
    "__future__", "array", "bisect", "cbor2", "collections", "dataclasses", "difflib", "enum", "functools", "hashlib",
    "heapq", "ipaddress", "itertools", "json", "math", "msgspec", "numpy", "operator", "re", "statistics", "struct",
    "tomllib", "typing", "zlib",
}  # fmt: skip
ALSO_ALLOWED = ("shared.contracts.", "services.router.native.")
CALLS_FORBIDDEN = {"open", "print", "input", "exec", "eval", "__import__"}
FRAGMENTS = re.compile(r"(Of|By|Likewise|Also|Neither|The same)\b")
"""How no docstring begins: what follows only continues the line above it."""
PRONOUNS = re.compile(
    r"(It|Its|They|Their|Those|These|That|This (is|was|has|may|can|must)|His|Such|See (above|below)|As (above|below))\b"
)
"""How no attribute's docstring begins: the noun would be in another line."""
PREPOSITIONS = re.compile(
    r"(About|Above|After|Against|Among|As|At|Before|Below|Between|Beyond|During|For|From|If|In|Into|On|Over|Per|Since|Than"
    r"|To|Under|Until|While|With|Within|Without)\b[^,]*?([.:] |;|$)"
)
"""An attribute's docstring without a noun of its own. With a comma ("With two routers, ...") it is a sentence."""
COLUMNS_MAX, ROW_COLUMNS_MAX = 120, 240
"""The width of a document's prose, and of a row of a table."""
MADE_PAGES = {
    "docs/METRICS.md", "docs/OUTSIDE.md", "docs/catalogue.md", "docs/configuration.md",
    *(f"docs/benchmarks/{name}.md" for name in (
        "connector-step", "fleet", "kv", "kv-gpu", "replay", "role-shift", "scale", "seeds", "seeds-gpu",
        "telemetry", "worker", "worker-gpu"
    )),
}  # fmt: skip
"""Documents that a program writes as a whole."""


@dataclass(frozen=True)
class Module:
    name: str
    path: str
    text: str
    tree: ast.Module

    def imports(self) -> Iterator[tuple[str, int]]:
        """Each imported module and each name imported from one, with its line."""
        for node in ast.walk(self.tree):
            yield from ((name, line) for _known_as, name, line in imported(node))

    def pure_code(self) -> tuple[list[ast.AST], list[tuple[str, int]]]:
        """What must be pure, and what that imports."""
        if is_pure(self.name):
            return [self.tree], list(self.imports())
        top = {known_as: node for node in self.tree.body for known_as in defined(node)}
        wanted, found = PURE_PARTS.get(self.name, "").split(), dict[str, ast.AST]()
        while wanted:
            name = wanted.pop()
            if name in top and name not in found:
                found[name] = top[name]
                wanted += [node.id for node in ast.walk(top[name]) if isinstance(node, ast.Name)]
        inside = (each for node in found.values() for each in ast.walk(node))
        from_top = (each for node in self.tree.body for each in imported(node) if each[0] in found)
        within = (each for node in inside for each in imported(node) if node not in self.tree.body)
        return list(found.values()), [(name, line) for _known_as, name, line in (*from_top, *within)]


def imported(node: ast.AST) -> Iterator[tuple[str, str, int]]:
    """How the module knows each name that this statement imports, the whole name, and the line."""
    if isinstance(node, ast.Import):
        yield from ((alias.asname or alias.name.partition(".")[0], alias.name, node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def defined(node: ast.stmt) -> Iterator[str]:
    """The names that a statement at the top of a module defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
    yield from (known_as for known_as, _name, _line in imported(node))


def main() -> int:
    modules = read_modules()
    problems = [*unknown_pure_modules(modules), *impurities(modules), *unused_modules(modules), *fragments(modules)]
    problems += [line for name, text in documents().items() for line in long_lines(name, text)]
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
    """Rows of ``PURE`` and ``PURE_PARTS`` that name nothing: it was moved, and is not checked any more."""
    named = [
        package if names == "*" else f"{package}.{name}" for package, names in PURE.items() for name in names.split()
    ]
    parts = [(module, part) for module, names in PURE_PARTS.items() for part in names.split()]
    known = {(name, part) for name, module in modules.items() for node in module.tree.body for part in defined(node)}
    return [
        *(f"scripts/check_structure.py: there is no module {name}" for name in named if name not in modules),
        *(
            f"scripts/check_structure.py: {module} has no {part}"
            for module, part in parts
            if (module, part) not in known
        ),
    ]


def impurities(modules: dict[str, Module]) -> Iterator[str]:
    """Imports and statements that pure code must not have."""
    for module in modules.values():
        code, imports = module.pure_code()
        for name, line in imports:
            if not (name.partition(".")[0] in IMPORTS_ALLOWED or name.startswith(ALSO_ALLOWED) or names_pure(name)):
                yield f"{module.path}:{line} imports {name} for pure code"
        for node in (each for part in code for each in ast.walk(part)):
            if isinstance(node, ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith | ast.Await | ast.Global):
                yield f"{module.path}:{node.lineno} has {type(node).__name__} in pure code"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS_FORBIDDEN:
                yield f"{module.path}:{node.lineno} calls {node.func.id} in pure code"


def names_pure(imported: str) -> bool:
    """Whether this is a pure module, something in one, or a pure part of another."""
    module, _, name = imported.rpartition(".")
    return is_pure(imported) or is_pure(module) or name in PURE_PARTS.get(module, "").split()


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


def fragments(modules: dict[str, Module]) -> Iterator[str]:
    """Docstrings that a reader understands only with the line above: those of attributes must be a sentence or a noun
    phrase.
    """
    for module in modules.values():
        for line, text, is_attribute in docstrings(module.tree):
            checks = (FRAGMENTS, PRONOUNS, PREPOSITIONS) if is_attribute else (FRAGMENTS,)
            if any(check.match(text) for check in checks):
                yield f"{module.path}:{line} has a docstring that does not stand alone: {text[:60]!r}"


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """The line and words of each docstring, and whether it follows an attribute that it describes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for index, statement in enumerate(body if isinstance(body, list) else []):
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, " ".join(value.value.split()), index > 0


def documents() -> dict[str, str]:
    """The text of each document that people write, by its path."""
    paths = {str(path.relative_to(ROOT)): path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]}
    return {name: paths[name].read_text(encoding="utf-8") for name in sorted(paths.keys() - MADE_PAGES)}


def long_lines(name: str, text: str) -> Iterator[str]:
    """Lines of a document beyond the width. Code, headings and the targets of links cannot be wrapped."""
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        start = line.lstrip()
        in_code ^= start.startswith("```")
        columns = ROW_COLUMNS_MAX if start.startswith("|") else COLUMNS_MAX
        if len(line) > columns and not (in_code or re.match(r"#|\[[^]]+\]: ", start)):
            yield f"{name}:{number} has {len(line)} columns of at most {columns}"


if __name__ == "__main__":
    sys.exit(main())
