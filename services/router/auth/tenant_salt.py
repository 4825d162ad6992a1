"""Salts that keep the cached KV of tenants apart.

The engine hashes a request's salt into its first block, and so into the whole chain. The same prompt of two tenants has
no block in common: not in an engine's cache, not in the prefix index, and not in a lease of the KV exchange, which
names blocks by these hashes. So neither cached tokens nor time to the first token tell what others have asked.
"""

from __future__ import annotations

import hashlib

import msgspec

from services.router.auth.api_keys import Key
from services.router.placement.request_fields import Fault, RequestFacts

OWN_CHARS_MAX = 128
"""Of a client's own salt; as vLLM has it."""
SALT_BYTES = 32
UNSALTED_PATHS = frozenset({"/tokenize", "/detokenize"})
"""They make no KV."""
BAD_SALT = Fault(param="cache_salt", message=f"`cache_salt` must be a string of 1 to {OWN_CHARS_MAX} characters.")
BAD_BODY = Fault(param="", message="The body is not a JSON object.")


def salt_key(secret: str) -> bytes:
    """The operator's secret, in the length that a keyed hash takes."""
    return hashlib.sha256(secret.encode()).digest()


def salt_of(secret: bytes, tenant: str, own: str) -> str:
    """The salt of a tenant's requests, or of those to which it gives a salt of its own. Nobody without the secret can
    name it. A tenant has no NUL in it, so that no two pairs are one.
    """
    said = f"{tenant}\0{own}".encode(errors="surrogatepass")
    return hashlib.blake2b(said, key=secret, digest_size=SALT_BYTES).hexdigest()


def salted(facts: RequestFacts, key: Key, secret: bytes) -> RequestFacts:
    """The request with the salt that keeps it apart; with a fault where there can be none. ``secret`` is empty where
    there are no tenants to keep apart.
    """
    body = facts.body
    if not secret or key.public_cache or facts.path in UNSALTED_PATHS:
        return facts
    if body is None:  # An engine might read what we cannot.
        return msgspec.structs.replace(facts, fault=BAD_BODY)
    own = "" if body.cache_salt is None else body.cache_salt
    if not isinstance(own, str) or (body.cache_salt is not None and not 1 <= len(own) <= OWN_CHARS_MAX):
        return msgspec.structs.replace(facts, fault=facts.fault or BAD_SALT)
    salt = salt_of(secret, key.tenant, own)
    return msgspec.structs.replace(facts, body=msgspec.structs.replace(body, cache_salt=salt), salt=salt)
