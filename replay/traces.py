"""Traces of requests as published, read into one form.

* Mooncake's (JSON lines: ``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids``): a block is 512
  tokens, and equal ids mean equal content. Its instants are rounded to the start of a window of some seconds, so
  requests are spread evenly over their window, at random by the seed.
* Azure's (CSV: ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``): no contents, so no prompts share any.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from hashlib import blake2b
from itertools import groupby
from pathlib import Path

import msgspec

BLOCK_TOKENS = 512
"""Tokens in a block of a trace."""
HASH_BYTES = 8
NAMES_KEPT = 1 << 19


class TraceError(ValueError):
    """The file is not a trace of a known format; the message says where."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. ``blocks`` are the contents of its prompt's full blocks: equal ids, equal tokens."""

    at_s: float
    blocks: tuple[int, ...]
    input_tokens: int
    output_tokens: int
    answer: tuple[int, ...] = ()
    """Contents of the blocks that its answer fills, if a later prompt may have them."""
    session: int = -1
    """Number of the session, whose requests follow each other; -1: no session."""
    gap_s: float | None = None
    """Closed loop: seconds from the end of the session's previous request to the arrival of this one. None: the request
    arrives at ``at_s``.
    """
    tenant: str = ""

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens."""
        return self.input_tokens + self.output_tokens


class MooncakeRow(msgspec.Struct):
    """One line of Mooncake's form."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, *, seed: int = 0) -> list[Request]:
    """All requests in the order of their arrival, the first at 0 s. Raises TraceError, and OSError."""
    reader = read_azure if path.suffix == ".csv" else read_mooncake
    requests = sorted(reader(path, random.Random(seed)), key=lambda request: request.at_s)
    if not requests:
        raise TraceError(f"{path} has no requests")
    start_s = requests[0].at_s
    return [replace(request, at_s=request.at_s - start_s) for request in requests]


def read_mooncake(path: Path, rng: random.Random) -> Iterator[Request]:
    """Lines of JSON."""
    windows = [(at / 1000, list(group)) for at, group in groupby(_mooncake_rows(path), key=lambda row: row.timestamp)]
    for (start_s, group), (end_s, _) in zip(windows, [*windows, (0.0, [])][1 : len(windows) + 1], strict=True):
        width_s = max(0.0, end_s - start_s) if len(group) > 1 else 0.0
        offsets = sorted(rng.uniform(0.0, width_s) for _ in group)
        for row, offset_s in zip(group, offsets, strict=True):
            full = tuple(row.hash_ids[: row.input_length // BLOCK_TOKENS])
            yield Request(start_s + offset_s, full, max(1, row.input_length), max(1, row.output_length))


def _mooncake_rows(path: Path) -> Iterator[MooncakeRow]:
    decoder = msgspec.json.Decoder(MooncakeRow)
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise TraceError(f"{path}, line {number}: {error}") from error


def read_azure(path: Path, _chance: random.Random) -> Iterator[Request]:
    """Lines of CSV."""
    unique = 0
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                at = datetime.fromisoformat(row["TIMESTAMP"][:26])
                tokens_in, tokens_out = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(f"{path}, line {number}: no TIMESTAMP, ContextTokens, GeneratedTokens") from error
            full = tokens_in // BLOCK_TOKENS
            blocks = tuple(range(unique, unique + full))
            unique += full
            yield Request(at.timestamp(), blocks, max(1, tokens_in), max(1, tokens_out))


def at_load(requests: list[Request], load: float) -> list[Request]:
    """The requests, arriving ``load`` times as fast.

    In a closed loop only sessions start faster. Turns that are then planned after the end of the trace are left out:
    nothing else would arrive beside them.
    """
    if all(request.gap_s is None for request in requests):
        return [replace(request, at_s=request.at_s / load) for request in requests]
    end_s = max(request.at_s for request in requests) / load
    starts: dict[int, float] = {}
    found = []
    for request in requests:
        started_s = request.at_s if request.gap_s is None else starts.setdefault(request.session, request.at_s)
        found.append(replace(request, at_s=request.at_s - started_s + started_s / load))
    return [request for request in found if request.at_s <= end_s]


def chains(requests: Iterable[Request]) -> list[tuple[int, ...]]:
    """For each request the chained 64-bit names of its blocks, as engines and router know them: its prompt's and then
    its answer's.
    """
    found = []
    for request in requests:
        parent, chain = 0, []
        for block in (*request.blocks, *request.answer):
            parent = _name(parent, block)
            chain.append(parent)
        found.append(tuple(chain))
    return found


@lru_cache(maxsize=NAMES_KEPT)
def _name(parent: int, block: int) -> int:
    """The name of a block that follows another. Kept, because the policies of a comparison get the same prompts."""
    digest = blake2b(f"{parent:x} {block:x}".encode(), digest_size=HASH_BYTES).digest()
    return int.from_bytes(digest, "big")
