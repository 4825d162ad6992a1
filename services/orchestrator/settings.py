"""Settings of an orchestrator, from ORCHESTRATOR_* variables."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from services.orchestrator.buckets import KeptFor
from services.orchestrator.planner.rules import Rules, read_models
from services.orchestrator.sleeping import SleepPolicy, read_after
from shared.contracts.batches import FILES_BYTES_MAX
from shared.contracts.control import LEADERSHIP_TTL_S
from shared.contracts.routers import RESPONSES_BYTES_MAX, RESPONSES_S
from shared.contracts.usage import LEDGER_DAYS


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raises ValueError for settings that cannot work."""

    instance: str = ""
    """One NATS subject token that no other orchestrator has or had; generated when empty."""
    lease_s: float = LEADERSHIP_TTL_S
    """How soon a standby takes over from a leader that died. The same for all orchestrators."""
    usage_days: Annotated[int, msgspec.Meta(ge=62)] = LEDGER_DAYS
    """Days that the usage ledger (`baton usage`) keeps a month after its last request. The same for all orchestrators.
    """
    responses_s: Annotated[float, msgspec.Meta(ge=60.0)] = RESPONSES_S
    """How long a response that routers keep (ROUTER_RESPONSE_BYTES_MAX) can be asked for. The same for all
    orchestrators.
    """
    responses_bytes_max: Annotated[int, msgspec.Meta(ge=0)] = RESPONSES_BYTES_MAX
    """All of them together, compressed, in NATS's files; beyond, the oldest go first. 0: none are kept."""
    files_bytes_max: Annotated[int, msgspec.Meta(ge=0)] = FILES_BYTES_MAX
    """All files of clients (ROUTER_FILES_BYTES_MAX) together, in NATS's files; beyond, uploads are refused and batches
    wait. 0: none are kept. The same for all orchestrators.
    """
    planner: Literal["off", "advise", "act"] = "advise"
    """Whether the leader publishes how many workers of which role it wants, and whether it changes the fleet."""
    planner_ttft_s: float = Rules().ttft_s
    """Target for the time to the first token of 95 of 100 requests; 0: no target."""
    planner_itl_s: float = Rules().itl_s
    """Target for the time between tokens, which limits decode batches; 0: no target."""
    planner_workers_min: int = Rules().workers_min
    """Workers of one model, all roles together."""
    planner_workers_max: int = Rules().workers_max
    """Workers of one model, all roles together; 0: no limit."""
    planner_models: str = ""
    """JSON: targets and limits of single models, such as ``{"my-model": {"ttft_s": 1, "workers_max": 4}}`` with any of
    ``ttft_s``, ``itl_s``, ``workers_min`` and ``workers_max``."""
    planner_time_scale: float = 1.0
    """Multiplies all times of the planner: below 1 it reacts sooner, and also to shorter peaks."""
    scaler: Literal["launcher", "webhook", "advice"] = "launcher"
    """Starts and stops workers: `baton up --workers-max`, the webhook ``scaler_url``, or nothing."""
    scaler_url: str = ""
    """POST, with a ``ScaleFleet`` as JSON."""

    sleep_after_s: str = ""
    """JSON: seconds without a request after which a model's workers end their engines and sleep, such as
    ``{"my-model": 600}``. Models that are not named stay awake."""
    awake_max: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Models that may be awake at a time; 0: all. For another one, the model that was unused longest goes to sleep."""
    wake_on_request: bool = True
    """Whether a request for a model that sleeps wakes it; otherwise only `baton wake` does."""

    def __post_init__(self) -> None:
        if self.scaler == "webhook" and not self.scaler_url:
            raise ValueError("the scaler is a webhook, so ORCHESTRATOR_SCALER_URL must be set")
        if self.planner_time_scale <= 0.0:
            raise ValueError("a planner's time_scale must be above 0")
        if self.planner_workers_min < 1:
            raise ValueError("a fleet needs at least one worker")
        try:
            self.sleep_policy()
        except (ValueError, msgspec.DecodeError) as error:
            raise ValueError(f"ORCHESTRATOR_SLEEP_AFTER_S: {error}; correct it or unset it") from error
        try:
            rules = self.rules()
        except (ValueError, msgspec.DecodeError) as error:
            raise ValueError(f"ORCHESTRATOR_PLANNER_MODELS: {error}; correct it or unset it") from error
        for model in rules.models:
            least, most = rules.of(model).workers_min, rules.of(model).workers_max
            if 0 < most < least:
                raise ValueError(f"ORCHESTRATOR_PLANNER_MODELS: {model} has workers_min {least}, workers_max {most}")

    def rules(self) -> Rules:
        """The planner's rules with these targets and limits."""
        rules = Rules(
            ttft_s=self.planner_ttft_s,
            itl_s=self.planner_itl_s,
            workers_min=self.planner_workers_min,
            workers_max=self.planner_workers_max,
            models=read_models(self.planner_models),
        )
        return rules.with_times(self.planner_time_scale)

    def kept_for(self) -> KeptFor:
        """How long and how much the buckets keep."""
        return KeptFor(
            usage_days=self.usage_days,
            responses_s=self.responses_s,
            responses_bytes_max=self.responses_bytes_max,
            files_bytes_max=self.files_bytes_max,
        )

    def sleep_policy(self) -> SleepPolicy:
        """Which models sleep, and when they wake. Raises ValueError, msgspec.DecodeError."""
        after_s = msgspec.json.decode(self.sleep_after_s.strip().encode() or b"{}", type=dict[str, float])
        return SleepPolicy(after_s=read_after(after_s), awake_max=self.awake_max, on_request=self.wake_on_request)
