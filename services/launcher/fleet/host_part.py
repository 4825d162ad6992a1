"""What one host of a fleet runs: the same from a fleet file and from a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from services.launcher.system.options import ModelOptions

FOR_SERVICES = ("ROUTER_", "COLLECTOR_", "ORCHESTRATOR_")
FOR_WORKERS = ("BATON_", "WORKER_", "VLLM_", "HF_", "UCX_", "NIXL_", "NCCL_", "GLOO_", "CUDA_", "PYTORCH_", "OMP_")
"""Prefixes of the variables that a fleet may set. Others, such as PATH or PYTHONPATH, belong to the host."""
OWN = ("BATON_NATS_URL", "BATON_NATS_NKEY_FILE", "BATON_NATS_CA_FILE", "BATON_STATE_DIR")
"""Variables that Baton sets itself."""


class HostPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workers of one host, with the devices that they may use."""

    name: str
    """Of the host: the ids of its workers begin with it, so that no two hosts have a worker of one id."""
    models: tuple[ModelOptions, ...] = ()
    engine: Literal["vllm", "simulated"] = "vllm"
    address: str = ""
    """At which other hosts reach this one; empty: that of its connection to NATS."""
    gpus: tuple[str, ...] = ()
    """GPU indexes as nvidia-smi shows them; empty: all."""
    cores: tuple[int, ...] = ()
    """Logical CPUs; empty: all."""
    env: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Variables of the processes of this host; those of its environment take precedence."""

    @property
    def of_workers(self) -> HostPart:
        """Without the variables of services: what a host that joins needs."""
        kept = {name: value for name, value in self.env.items() if name.startswith(FOR_WORKERS)}
        return msgspec.structs.replace(self, env=kept)


def unusable_variable(name: str) -> str:
    """Why a fleet cannot set this variable; empty if it can."""
    if name in OWN:
        return "Baton sets it itself; leave it out"
    if name.startswith(FOR_SERVICES + FOR_WORKERS):
        return ""
    return f"a fleet sets variables that begin with {', '.join(FOR_SERVICES + FOR_WORKERS)}; others belong to the host"
