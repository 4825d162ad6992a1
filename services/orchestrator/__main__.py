"""``python -m services.orchestrator``: one orchestrator. Of several, one leads."""

from __future__ import annotations

import secrets

from services.orchestrator.service import Orchestrator, check
from services.orchestrator.settings import Settings
from shared.contracts.control import ServicePhase
from shared.runtime.service import Service, refuse, run_service
from shared.runtime.settings import SettingsError, load, load_common


def main() -> None:
    try:
        common, settings = load_common(), load(Settings, "ORCHESTRATOR_")
        check(settings)
    except SettingsError as error:
        refuse("orchestrator", error)

    async def live(service: Service) -> None:
        def on_ready() -> None:
            service.set_phase(ServicePhase.READY)

        name, waits = service.facts.instance, service.waits
        await Orchestrator(service.bus, service.clock, name, settings, waits=waits).run(service.stopping, on_ready)

    # Random, not the process id: processes in two containers may have the same id, and two orchestrators of one name
    # would both lead.
    run_service("orchestrator", settings.instance or f"orchestrator-{secrets.token_hex(3)}", common, live)


main()
