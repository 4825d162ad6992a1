"""What can be asked for just now: `/v1/models`, with the revisions that serve each model and their shares."""

from __future__ import annotations

from typing import Any

from services.router.placement.revisions import Shares
from services.router.state.cluster_view import WorkerView
from services.router.state.fleet import Fleet


def list_models(fleet: Fleet, shares: Shares, now: float, created: int) -> list[dict[str, Any]]:
    """OpenAI's model objects of everything that ready workers offer."""
    offering: dict[str, list[WorkerView]] = {}
    for view in fleet.cluster.workers.values():
        if view.fit(now, fleet.policy.silent_s_max):
            for model in view.record.models:
                offering.setdefault(model, []).append(view)
    return [_model(name, views, shares, created) for name, views in offering.items()]


def _model(name: str, views: list[WorkerView], shares: Shares, created: int) -> dict[str, Any]:
    record = views[-1].record
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "baton",
        "root": record.fingerprint.model,
        "parent": None,
        "max_model_len": record.max_model_len,
        "permission": [],
        "revisions": _revisions(name, views, shares),
    }


def _revisions(name: str, views: list[WorkerView], shares: Shares) -> list[dict[str, Any]]:
    """The oldest worker's first."""
    workers: dict[str, dict[str, int]] = {}
    for view in views:
        roles = workers.setdefault(view.record.fingerprint.revision, {})
        roles[view.record.role.value] = roles.get(view.record.role.value, 0) + 1
    return [
        {"revision": revision, "share": shares.share(name, revision), "workers": roles}
        for revision, roles in workers.items()
    ]
