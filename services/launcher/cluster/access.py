"""The `baton` command's own NATS credentials: from its settings, or from the running system."""

from __future__ import annotations

import os

from services.launcher.cluster.folder import variables
from services.launcher.system.machine import inherited_environment
from shared.bus.nats_credentials import Access
from shared.contracts.channels import Party
from shared.runtime.settings import load_common


def use_keys(folder: str) -> None:
    """Use the launcher's key in that folder of `baton init`, unless the environment names another."""
    if not any(os.environ.get(name) for name in variables(folder, Party.LAUNCHER)):
        os.environ.update(variables(folder, Party.LAUNCHER))


def launcher_access() -> Access:
    """Raises SettingsError."""
    return load_common(inherited_environment()).nats_access(Party.LAUNCHER)
