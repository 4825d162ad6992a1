"""``python -m services.router``: one router process."""

from __future__ import annotations

import secrets
import sys

from services.router.service import check, serve
from services.router.settings import Settings
from shared.addresses import url_of
from shared.http.limits import allow_open_files
from shared.http.server import PortTaken, listen, share
from shared.runtime.service import refuse, run_service
from shared.runtime.settings import SettingsError, load, load_common


def main() -> None:
    """Read the settings, take the port, serve."""
    try:
        common, settings = load_common(), load(Settings, "ROUTER_")
        check(settings)
        allow_open_files(settings.connections_max)
        listener = listen(settings.host, settings.port)
        shared = share(settings.host, settings.shared_port) if settings.shared_port else None
    except SettingsError as error:
        refuse("router", error)
    except PortTaken as error:  # A restart may help: an earlier router may still hold the port.
        sys.exit(f"router: {error}")
    host, port = listener.getsockname()[:2]
    run_service(
        "router",
        settings.instance or f"router-{secrets.token_hex(3)}",
        common,
        lambda service: serve(service, settings, common, listener, shared),
        url=url_of("http", host, port),
        drain_s_max=settings.drain_s_max,
        listener=listener,
    )


if __name__ == "__main__":
    main()
