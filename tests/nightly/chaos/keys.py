"""The API keys of a fleet whose routers need one: an operator revokes one of them and lets it in again."""

from __future__ import annotations

import hashlib
from pathlib import Path

STEADY, REVOCABLE = (f"baton-chaos-{name}-{'0' * 43}" for name in ("steady", "revocable"))
REFUSED = {"invalid_api_key": 401, "forbidden": 403}
"""What a client with a revoked key is told, and the statuses: of a new request, and of one that was under way."""
RELOAD_S_MAX = 6.0
"""Until routers have read a changed file; they look every two seconds."""
SALT = "0" * 64


class KeysFile:
    """The file of ``ROUTER_KEYS_FILE``, with both keys as it begins."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write(STEADY, REVOCABLE)

    def write(self, *keys: str) -> None:
        """Only these are valid from now on. Routers never see half of the file."""
        entries = (
            f'[[key]]\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\ntenant = "tenant-{number}"\n'
            for number, key in enumerate(keys)
        )
        draft = self.path.with_suffix(".new")
        draft.write_text("\n".join([f'salt = "{SALT}"', *entries]))
        draft.replace(self.path)
