"""The code that a row depends on, as a digest: a row with another digest is older than the code.

Rows of other systems' policies depend on the replay and on what it uses of the router and of the simulated engine, and
not on how Baton places and admits (``BATON_ONLY``); a test runs them and looks which modules they execute.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from bench.study.plan import OWN

ROOT = Path(__file__).resolve().parents[2]
DEPENDS = (
    "replay/*.py",
    "bench/policies/*.py",
    "bench/study/experiment.py",
    "bench/study/results.py",
    "bench/study/runs.py",
    "bench/study/samples.py",
    "bench/study/tuned.json",
    "bench/study/workloads.py",
    "services/router/placement/*.py",
    "services/router/admission/*.py",
    "services/router/state/*.py",
    "services/router/native/*.[ch]",
    "services/router/request/facts.py",
    "services/router/request/timings.py",
    "services/worker/engines/simulated/core/groups.py",
    "services/worker/engines/simulated/core/settings.py",
    "services/worker/engines/simulated/core/step_models.py",
    "shared/engine_speed/*.py",
)
IGNORED = (
    "replay/cli.py",
    "bench/policies/oracle.py",
    "services/router/admission/admission_queue.py",
    "services/router/admission/bus_health.py",
    "services/router/admission/placing.py",
    "services/router/admission/prefetches.py",
    "services/router/admission/waker.py",
    "services/router/state/quarantine.py",
    "services/router/state/reservations.py",
)
"""What no run of the study executes: the command line, the analysis of runs, and what reads requests and messages."""
ANALYSIS = ("bench/study/bound.py", "bench/study/statistics.py", "bench/study/rows.py")
BATON_ONLY = (
    "services/router/admission/admission.py",
    "services/router/admission/fair_share.py",
    "services/router/admission/pacing.py",
    "services/router/admission/queues.py",
    "services/router/placement/assembly.py",
    "services/router/placement/candidates.py",
    "services/router/placement/revisions.py",
    "services/router/placement/specification.py",
    "services/router/native/placement.c",
    "services/router/native/placement.h",
    "services/router/native/placement_module.c",
    "services/router/request/timings.py",
)
"""Modules that only Baton's own placement runs."""


def is_own(policy: str) -> bool:
    """Whether it is one of Baton's, with any queue or values."""
    return policy.partition("[")[0].partition("+")[0] in OWN


@cache
def digest_of(*, own: bool) -> str:
    """Of the code that runs of Baton's policies depend on, or of others."""
    return _of(files_of(own=own))


def code_of(policy: str) -> str:
    """Of the code that a run of this policy depends on."""
    return digest_of(own=is_own(policy))


@cache
def analysis_digest() -> str:
    """Of the code that makes bounds and intervals of runs."""
    return _of([ROOT / name for name in ANALYSIS])


def files_of(*, own: bool) -> list[Path]:
    """All of that code."""
    left_out = {*IGNORED, *(() if own else BATON_ONLY)}
    found = {path for pattern in DEPENDS for path in ROOT.glob(pattern)}
    return sorted(path for path in found if str(path.relative_to(ROOT)) not in left_out)


class _WithoutTexts(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Drop docstrings."""
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node


def _code(path: Path) -> bytes:
    """Of a Python file without comments, docstrings and layout, which change no result."""
    whole = path.read_bytes()
    return ast.dump(_WithoutTexts().visit(ast.parse(whole))).encode() if path.suffix == ".py" else whole


def _of(paths: Iterable[Path]) -> str:
    whole = hashlib.blake2b(digest_size=8)
    for path in paths:
        whole.update(f"{path.relative_to(ROOT)}\n".encode())
        whole.update(hashlib.blake2b(_code(path)).digest())
    return whole.hexdigest()
