"""The `baton` command's own NATS credentials: from its settings, or from the running system."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from services.launcher.cluster.folder import NKEY, folder_of, variables
from services.launcher.system.machine import inherited_environment
from shared.bus.nats_credentials import Access
from shared.contracts.channels import Party
from shared.runtime.settings import load_common


def use_keys(folder: str, *, over_environment: bool = False) -> None:
    """Use the launcher's key in that folder of `baton init`, unless the environment names another."""
    own = variables(folder, Party.LAUNCHER)
    if over_environment or not any(os.environ.get(name) for name in own):
        os.environ.update(own)


def keys_for(nats_url: str, folder: str) -> str:
    """The folder, if it has keys and that NATS, which is not ours, uses TLS; else empty."""
    has_keys = (Path(folder) / folder_of(Party.LAUNCHER) / NKEY).is_file()
    return folder if has_keys and urlsplit(nats_url).scheme == "tls" else ""


def launcher_access() -> Access:
    """Raises SettingsError."""
    return load_common(inherited_environment()).nats_access(Party.LAUNCHER)
