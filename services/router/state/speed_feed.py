"""What workers measure, to where placement looks: reports become coefficients in the cluster's view."""

from __future__ import annotations

from services.router.state.cluster_view import ClusterView
from services.router.state.engine_speed import EngineSpeed
from services.router.state.speed_samples import Measurements
from shared.contracts.ids import WorkerId
from shared.contracts.inference import LegReport, StartLeg
from shared.contracts.load import LoadReport
from shared.contracts.workers import WorkerRecord


class Measures:
    """Told by the feeds and by the legs; at most one set of coefficients goes on for each."""

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self._measurements = Measurements()

    def joined(self, record: WorkerRecord) -> None:
        """The registry tells of a worker, for the first time or again."""
        self._pass_on(record.worker_id, self._measurements.joined(record))

    def load(self, load: LoadReport) -> None:
        """A worker reports."""
        self._pass_on(load.worker_id, self._measurements.load(load))

    def gone(self, worker_id: WorkerId) -> None:
        """Nobody asks for its coefficients any more."""
        self._measurements.gone(worker_id)

    def leg_ended(self, start: StartLeg, report: LegReport | None, first_token_s: float | None) -> None:
        """Well; ``first_token_s``: from its start to its first token, None where that was not seen."""
        if report is not None and start.epoch is not None:
            known = self._measurements.leg(start.worker_id, start.epoch, report, first_token_s)
            self._pass_on(start.worker_id, known)

    def learned(self) -> dict[WorkerId, EngineSpeed]:
        """Of every worker, as it is known now."""
        return self._measurements.known()

    def _pass_on(self, worker_id: WorkerId, coefficients: EngineSpeed | None) -> None:
        if coefficients is not None:
            self._cluster.learned(worker_id, coefficients)
