"""The operator's API keys and the secret of the tenants' cache salts, from the settings and the files they name."""

from __future__ import annotations

import tomllib
from pathlib import Path

from services.router.auth.api_keys import SALT_CHARS_MIN, Keyring, read_keys, salt_key
from services.router.settings import Settings
from shared.runtime.settings import SettingsError, why_unusable

FILE_BYTES_MAX = 32 * 1024 * 1024
"""A larger file is not one that an operator wrote."""


def check_access(settings: Settings) -> None:
    """Clients on other machines need keys. Raises SettingsError."""
    keyring = keyring_of(settings)
    if keyring is not None:
        salt_secret_of(settings, keyring)
    elif not settings.is_local and not settings.insecure:
        raise SettingsError(
            f"every client that reaches {settings.published_host or settings.host} could use it without an API key; "
            "make one with `baton keys new --tenant NAME --file keys.toml` and set ROUTER_KEYS_FILE=keys.toml "
            "(compose: KEYS_FILE), or set ROUTER_INSECURE=true (`baton up --insecure`; compose: INSECURE=true) if only "
            "trusted clients can reach it"
        )


def keyring_of(settings: Settings) -> Keyring | None:
    """The API keys; None where no key is needed. Raises SettingsError."""
    if settings.keys_file and settings.keys:
        raise SettingsError("ROUTER_KEYS_FILE and ROUTER_KEYS are both set; unset one")
    if not settings.keys_file and not settings.keys:
        return None
    where = f"ROUTER_KEYS_FILE ({settings.keys_file}; compose: KEYS_FILE)" if settings.keys_file else "ROUTER_KEYS"
    try:
        text = read_text(settings.keys_file) if settings.keys_file else settings.keys
        return read_keys(tomllib.loads(text))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{where}: {why_unusable(error)}; correct it or unset it") from error


def salt_secret_of(settings: Settings, keyring: Keyring) -> bytes:
    """The secret of the tenants' cache salts. Raises SettingsError."""
    try:
        text = read_text(settings.salt_file).strip() if settings.salt_file else keyring.salt
    except (OSError, ValueError) as error:
        raise SettingsError(f"ROUTER_SALT_FILE ({settings.salt_file}): {error}; correct it or unset it") from error
    if len(text) < SALT_CHARS_MIN:
        raise SettingsError(
            f"tenants' caches cannot be separated: the secret of their salts has {len(text)} characters and must have "
            f'{SALT_CHARS_MIN} random ones or more; put `salt = "..."` on top of the API keys '
            "(`baton keys new --file` does), or set ROUTER_SALT_FILE, the same for all routers"
        )
    return salt_key(text)


def read_text(path: str) -> str:
    """A file that the operator wrote. Raises OSError, ValueError."""
    with Path(path).open("rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"it has more than {FILE_BYTES_MAX} bytes")
    return data.decode()
