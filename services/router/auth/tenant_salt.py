"""Cache salts that separate the cached KV of tenants.

The engine hashes a request's salt into its first block, and so into the whole chain. The same prompt of two tenants has
no block in common: neither in an engine's cache, nor in the prefix index, nor in a lease of the KV exchange, which
names blocks by these hashes. So neither cached tokens nor the time to the first token reveal other tenants' prompts.
"""

from __future__ import annotations

import hashlib

import msgspec

from services.router.auth.api_keys import Key
from services.router.placement.request_fields import Fault, RequestFacts

OWN_CHARS_MAX = 128
"""Length of a client's own salt; vLLM's limit."""
SALT_BYTES = 32
UNSALTED_PATHS = frozenset({"/tokenize", "/detokenize"})
"""Endpoints that compute no KV."""
BAD_SALT = Fault(param="cache_salt", message=f"`cache_salt` must be a string of 1 to {OWN_CHARS_MAX} characters.")
BAD_BODY = Fault(param="", message="The body is not a JSON object.")


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
    needed.
    """
    body = facts.body
    if not secret or key.public_cache or facts.path in UNSALTED_PATHS:
        return facts
    if body is None:  # The engine's parser might accept it, and serve it without a salt.
        return msgspec.structs.replace(facts, fault=BAD_BODY)
    own = "" if body.cache_salt is None else body.cache_salt
    if not isinstance(own, str) or (body.cache_salt is not None and not 1 <= len(own) <= OWN_CHARS_MAX):
        return msgspec.structs.replace(facts, fault=facts.fault or BAD_SALT)
    salt = salt_of(secret, key.tenant, own)
    return msgspec.structs.replace(facts, body=msgspec.structs.replace(body, cache_salt=salt), salt=salt)
