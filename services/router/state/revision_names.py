"""Names of a model's revisions, and their abbreviations."""

from __future__ import annotations

ANY = ""
"""Any revision, with or without a share."""
ABBREVIATED_MIN = 7
"""The shortest abbreviation of a commit or digest."""
HEXADECIMAL = frozenset("0123456789abcdef")


def means(name: str, revision: str) -> bool:
    """Whether ``name`` is the revision, or abbreviates it as the first digits of a commit or digest."""
    if name in (ANY, revision):
        return True
    return len(name) >= ABBREVIATED_MIN and revision.startswith(name) and HEXADECIMAL.issuperset(revision)
