"""Settings of an orchestrator, from ORCHESTRATOR_* variables."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shared.contracts.batches import FILES_BYTES_MAX
from shared.contracts.control import LEADERSHIP_TTL_S
from shared.contracts.routers import RESPONSES_BYTES_MAX, RESPONSES_S
from shared.contracts.usage import LEDGER_DAYS


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An orchestrator's settings. Every ``_s`` is in seconds, every ``_bytes_max`` in bytes."""

    # Leadership
    instance: str = ""
    """One NATS subject token that no other orchestrator has or had; generated when empty. Change it when logs are to
    name the leader.
    """
    lease_s: float = LEADERSHIP_TTL_S
    """How soon a standby takes over from a leader that died; equal on all orchestrators. Change it when losses of
    workers must be noticed sooner after a leader's death.
    """

    # What NATS keeps
    usage_days: Annotated[int, msgspec.Meta(ge=62)] = LEDGER_DAYS
    """Days that the usage ledger (`baton usage`) keeps a month after its last request; equal on all orchestrators.
    Change it when bills must be explained for longer.
    """
    responses_s: Annotated[float, msgspec.Meta(ge=60.0)] = RESPONSES_S
    """How long a response that routers keep (``ROUTER_RESPONSE_BYTES_MAX``) can be asked for; equal on all
    orchestrators. Change it when conversations continue after a day, or must be forgotten sooner.
    """
    responses_bytes_max: Annotated[int, msgspec.Meta(ge=0)] = RESPONSES_BYTES_MAX
    """All kept responses together, compressed, in NATS's files; beyond, the oldest go first. 0: none are kept. Equal on
    all orchestrators. Change it when responses are gone before their time.
    """
    files_bytes_max: Annotated[int, msgspec.Meta(ge=0)] = FILES_BYTES_MAX
    """All files of clients (``ROUTER_FILES_BYTES_MAX``) together, in NATS's files; beyond, uploads are refused and
    batches wait. 0: none are kept. Equal on all orchestrators. Change it when clients have larger batches, and the disk
    has room.
    """

    # Planner
    planner: Literal["off", "advise", "act"] = "advise"
    """Whether the leader publishes how many workers of which role it wants (advise), and also changes the fleet (act),
    or neither (off). Change it when you trust its advice.
    """
    planner_ttft_s: Annotated[float, msgspec.Meta(ge=0.0)] = 2.0
    """Target for the time to the first token of 95 of 100 requests; 0: no target. Change it when you have promised
    another one.
    """
    planner_itl_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.05
    """Target for the time between tokens, which limits decode batches; 0: no target. Change it when you have promised
    another one.
    """
    planner_models: str = ""
    """JSON: targets and limits of single models, such as ``{"my-model": {"ttft_s": 1, "workers_min": 1, "workers_max":
    4}}`` with any of ``ttft_s``, ``itl_s``, ``workers_min`` and ``workers_max`` (all roles of a model together). The
    model ``*`` stands for all others. Without it a model has one worker or more, and no limit. Change it when models
    differ, or the fleet must not grow or shrink beyond a number; `baton up --workers-max` sets it.
    """
    planner_time_scale: Annotated[float, msgspec.Meta(gt=0.0)] = 1.0
    """Factor of all times of the planner: below 1 it reacts sooner, and also to shorter peaks. Change it when workers
    start within seconds, or are expensive to start.
    """
    scaler_url: str = ""
    """Webhook that starts and stops workers: it gets a POST with a ``ScaleFleet`` as JSON. Empty: `baton up
    --workers-max` does. Change it when another system, such as a cluster's, starts workers.
    """
    stateful_sets: str = ""
    """JSON: StatefulSets of Kubernetes whose replicas the planner changes through the API server, such as ``{"decode":
    {"role": "decode", "model": "my-model", "replicas_max": 16}}``; without ``model``, whatever they serve. Empty: none.
    Change it when the planner acts on Kubernetes, where its service account may scale them.
    """

    # Sleeping models
    sleep_after_s: str = ""
    """JSON: seconds without a request after which a model's workers end their engines and sleep, such as ``{"my-model":
    600}``. Models that are not named stay awake. Change it when more models than fit are served on the same GPUs.
    """
    awake_max: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Models that may be awake at a time; 0: all. For another one, the model that was unused longest goes to sleep.
    Change it when fewer models fit at a time than are served.
    """
    wake_on_request: bool = True
    """Whether a request for a model that sleeps wakes it; otherwise only `baton wake` does. Change it when a person
    decides which models run.
    """
