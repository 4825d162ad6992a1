"""``python -m services.collector``: the metrics collector."""

from __future__ import annotations

import secrets
import sys
from functools import partial

from services.collector.access import check
from services.collector.app import LIMITS
from services.collector.service import run_collector
from services.collector.settings import Settings
from shared.addresses import url_of
from shared.http.limits import allow_open_files
from shared.http.server import PortTaken, listen
from shared.runtime.service import refuse, run_service
from shared.runtime.settings import SettingsError, load, load_common


def main() -> None:
    try:
        common, settings = load_common(), load(Settings, "COLLECTOR_")
        check(settings)
        allow_open_files(LIMITS.connections_max)
        listener = listen(settings.host, settings.port, "COLLECTOR_")
    except SettingsError as error:
        refuse("collector", error)
    except PortTaken as error:  # A restart may help: an earlier collector may still hold the port.
        sys.exit(f"collector: {error}")
    serve = partial(run_collector, settings=settings, listener=listener, otlp_endpoint=common.otlp_endpoint)
    instance = f"collector-{secrets.token_hex(3)}"
    url = url_of("http", settings.host, settings.port)
    run_service("collector", instance, common, serve, url=url, listener=listener)


main()
