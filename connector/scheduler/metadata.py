"""The connector's orders and reports, dressed as vLLM wants them between its scheduler and its workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from connector.scheduler.orders import Orders, Results


@dataclass
class StepOrders(KVConnectorMetadata):
    """Scheduler role -> worker role, each step."""

    orders: Orders = field(default_factory=Orders)
    wait_s: float = 0.0
    """How long to wait, at the end of the step, for something to become final."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Worker role -> scheduler role, after a step in which something became final; one ``Results`` per rank."""

    results: list[Results] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """All ranks' reports as one."""
        assert isinstance(other, StepReport)
        return StepReport(self.results + other.results)
