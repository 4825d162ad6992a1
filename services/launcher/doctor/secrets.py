"""What `baton doctor` looks at of keys and certificates: until when they hold, and who may read them."""

from __future__ import annotations

import os
from pathlib import Path

from services.launcher.cluster.certificates import NoCertificate, facts_of
from services.launcher.cluster.folder import AUTHORITY, AUTHORITY_KEY, SERVER, SERVER_KEY
from services.launcher.commands.init import FOLDER
from services.launcher.doctor.facts import Certificate
from services.launcher.system.machine import KEYS_VARIABLE
from shared.runtime.settings import CommonSettings

OTHERS_MAY_READ = 0o044


def certificates(common: CommonSettings, now_s: float) -> list[Certificate]:
    """Those that our process trusts, and those that `baton init` made here."""
    cluster = Path(common.state_dir) / FOLDER
    made = [path for path in (cluster / AUTHORITY, cluster / SERVER) if path.is_file()]
    trusted = [Path(common.nats_ca_file)] if common.nats_ca_file else []
    return [certificate(path, now_s) for path in (*trusted, *made)]


def certificate(path: Path, now_s: float) -> Certificate:
    """How long it holds."""
    try:
        ends_at = facts_of(path.read_bytes()).ends_at
    except (OSError, NoCertificate) as error:
        return Certificate(path=str(path), failure=str(error))
    return Certificate(path=str(path), ends_in_s=ends_at.timestamp() - now_s)


def exposed(common: CommonSettings) -> list[str]:
    """Files with keys that others may read."""
    cluster = Path(common.state_dir) / FOLDER
    named = [common.nats_nkey_file, os.environ.get(KEYS_VARIABLE, "")]
    secret = [Path(name) for name in named if name] + [
        cluster / AUTHORITY_KEY,
        cluster / SERVER_KEY,
        *cluster.glob("*/nkey"),
    ]
    return sorted(str(path) for path in secret if path.is_file() and path.stat().st_mode & OTHERS_MAY_READ)
