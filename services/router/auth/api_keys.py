"""API keys: their tenant, permissions, priority, rate limits and models; and the cache salts of their tenants.

A salt separates the cached KV of tenants. The engine hashes it into a request's first block, and so into the whole
chain. The same prompt of two tenants has no block in common: neither in an engine's cache, nor in the prefix index, nor
in a lease of the KV exchange, which identifies blocks by these hashes. So neither cached tokens nor the time to the
first token reveal other tenants' prompts.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import msgspec

from services.router.request.facts import Fault, RequestFacts
from services.router.request.fields import PRIORITY_MAX, PRIORITY_MIN, is_priority
from shared.contracts.api_keys import Key, Permission
from shared.contracts.engine_paths import COUNT_TOKENS, TOKENIZER_INFO
from shared.contracts.ids import is_subject_token

DIGEST = re.compile(r"[0-9a-f]{64}")
KEYS_MAX = 100_000
SALT_CHARS_MIN = 32
PER_MINUTE_MAX = 1 << 40

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/healthcheck", "/ping"})
"""Served without a key, to probes of load balancers."""
METRICS_PATH = "/metrics"

OWN_CHARS_MAX = 128
"""Length of a client's own salt; vLLM's limit."""
SALT_BYTES = 32
UNSALTED_PATHS = frozenset({"/tokenize", "/detokenize", COUNT_TOKENS, TOKENIZER_INFO})
"""Endpoints that compute no KV."""
BAD_SALT = Fault(param="cache_salt", message=f"`cache_salt` must be a string of 1 to {OWN_CHARS_MAX} characters.")
BAD_BODY = Fault(param="", message="The body is not a JSON object.")


class Keyring(msgspec.Struct, frozen=True, kw_only=True):
    """All keys of the operator's file."""

    keys: dict[str, Key] = {}
    """Keys by SHA-256."""
    salt: str = ""
    """The secret of the tenants' cache salts; empty: ROUTER_SALT_FILE has it."""


class _Written(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: list[Key] = []
    salt: str = ""


def read_keys(toml: dict[str, Any]) -> Keyring:
    """Keys from the operator's TOML. Raises ValueError with a message for the operator."""
    try:
        written = msgspec.convert(toml, _Written)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    if not written.key:
        raise ValueError("there is no [[key]]; make one with `baton keys new`")
    if len(written.key) > KEYS_MAX:
        raise ValueError(f"there are {len(written.key)} keys, {KEYS_MAX} at most are allowed")
    if written.salt and len(written.salt) < SALT_CHARS_MIN:
        raise ValueError(f"salt has {len(written.salt)} characters; it must have {SALT_CHARS_MIN} random ones or more")
    keys: dict[str, Key] = {}
    labels: set[str] = set()
    for number, key in enumerate(written.key, 1):
        wrong = _fault(key) or ("it is listed twice" if key.sha256 in keys else "")
        if wrong := wrong or (f"another key has the name {key.label!r}" if key.label in labels else ""):
            raise ValueError(f"[[key]] number {number} (tenant {key.tenant[:64]!r}): {wrong}")
        keys[key.sha256] = key
        labels.add(key.label)
    return Keyring(keys=keys, salt=written.salt)


def may_see(key: Key, path: str, *, metrics_open: bool) -> bool:
    """Whether the key may read this path, which is not inference."""
    return path != METRICS_PATH or metrics_open or key.sees_all


def _fault(key: Key) -> str:
    if not DIGEST.fullmatch(key.sha256):
        return "sha256 must be the key's SHA-256 in 64 hexadecimal digits"
    if not key.tenant or not is_subject_token(key.tenant):
        return "tenant must be up to 128 letters, digits, underscores and hyphens"
    if key.name and not is_subject_token(key.name):
        return "name must be up to 128 letters, digits, underscores and hyphens"
    if not key.permissions:
        return f"permissions must be some of {', '.join(Permission)}"
    if key.priority is not None and not is_priority(key.priority):
        return f"priority must be {PRIORITY_MIN} to {PRIORITY_MAX}"
    for name in ("requests_per_minute", "tokens_per_minute", "monthly_tokens", "sequences_max"):
        if not 0 <= getattr(key, name) <= PER_MINUTE_MAX:
            return f"{name} must be a positive number, or 0 for no limit"
    return ""


def salt_key(secret: str) -> bytes:
    """The operator's secret, hashed to the key length of BLAKE2."""
    return hashlib.sha256(secret.encode()).digest()


def salt_of(secret: bytes, tenant: str, own: str) -> str:
    """The salt of a tenant's requests; ``own`` is the client's own salt, or empty. It cannot be computed without the
    secret. Tenants' names contain no NUL, so that different pairs never give the same input.
    """
    pair = f"{tenant}\0{own}".encode(errors="surrogatepass")
    return hashlib.blake2b(pair, key=secret, digest_size=SALT_BYTES).hexdigest()


def salted(facts: RequestFacts, key: Key, secret: bytes) -> RequestFacts:
    """The request with its tenant's salt, or with a fault when it cannot have one. ``secret`` is empty where no key is
    required.
    """
    body = facts.body
    if not secret:
        return facts
    if key.public_cache or facts.path in UNSALTED_PATHS:
        return msgspec.structs.replace(facts, media_salt=salt_of(secret, key.tenant, ""))
    if body is None:  # The engine's parser might accept it, and serve it without a salt.
        return msgspec.structs.replace(facts, fault=facts.fault or BAD_BODY)
    own = "" if body.cache_salt is None else body.cache_salt
    if not isinstance(own, str) or (body.cache_salt is not None and not 1 <= len(own) <= OWN_CHARS_MAX):
        return msgspec.structs.replace(facts, fault=facts.fault or BAD_SALT)
    salt = salt_of(secret, key.tenant, own)
    return msgspec.structs.replace(facts, body=msgspec.structs.replace(body, cache_salt=salt), salt=salt)
