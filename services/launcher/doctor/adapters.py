"""Findings about LoRA adapters: workers that lack one, or have other files under its name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from services.launcher.doctor.findings import Area, Finding, Level
from shared.contracts.workers import WorkerRecord

DIGEST_CHARS = 12


def about_adapters(model: str, records: list[WorkerRecord]) -> Iterator[Finding]:
    """``records``: ready workers of one model."""
    holders: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for adapter in record.adapters:
            holders[adapter.name][adapter.digest].append(record.worker_id)
    for name, files in sorted(holders.items()):
        having = {worker for workers in files.values() for worker in workers}
        lacking = [record.worker_id for record in records if record.worker_id not in having]
        if len(files) > 1:
            groups = "; ".join(
                f"{digest[:DIGEST_CHARS]}: {', '.join(sorted(those))}" for digest, those in sorted(files.items())
            )
            what = f"Workers have different files of the adapter {name} ({groups})."
            why = "They exchange no KV of it, and their answers differ."
            todo = f"`baton lora load {name} PATH` loads one version on all."
            yield Finding(area=Area.WORKERS, level=Level.WARNING, what=what, why=why, todo=todo)
        elif lacking:
            what = f"The adapter {name} of {model} is not loaded on {', '.join(sorted(lacking))}."
            why = "Requests for it go to the others, and are disaggregated only among those."
            todo = f"`baton lora load {name} PATH` loads it on all."
            yield Finding(area=Area.WORKERS, level=Level.NOTE, what=what, why=why, todo=todo)
