"""The load of ``bench_index`` on the RadixTree of the PyPI package ai-dynamo-runtime, in an interpreter that has it:
``PYTHON bench/peer_radix_tree.py '{"entries": 1000000}'`` prints its measurements as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from dynamo._core import RadixTree  # type: ignore[import-not-found]
from index_load import Load, applied, call_us, rates, rss_bytes, unpacked  # type: ignore[import-not-found]

LOOKUPS = 3000


def event(data: dict[str, Any]) -> bytes:
    return json.dumps({"event_id": 1, "data": data}).encode()


def stored(load: Load, number: int) -> list[tuple[int, bytes]]:
    blocks = [{"block_hash": block, "tokens_hash": block} for block in unpacked(load.chain(number))]
    said = event({"stored": {"parent_hash": None, "blocks": blocks}})
    return [(worker, said) for worker in load.holders_of(number)]


def removed(load: Load, number: int) -> list[tuple[int, bytes]]:
    blocks = unpacked(load.chain(number))[load.blocks // 2 :]
    said = event({"removed": {"block_hashes": list(reversed(blocks))}})
    return [(worker, said) for worker in load.holders_of(number)]


def main() -> None:
    load = Load(**json.loads(sys.argv[1]))
    tree = RadixTree()
    chains = [load.chain(number) for number in load.sample(LOOKUPS)]
    prompts = [list(unpacked(chain)) for chain in chains]
    absent = [[block ^ 1 << 62 for block in prompt] for prompt in prompts]
    before = rss_bytes()
    used = applied(lambda number: stored(load, number), range(load.chains()), lambda one: tree.apply_event(*one))
    tree.find_matches(prompts[0])  # behind all that was applied
    said = {"bytes_per_entry": (rss_bytes() - before) / load.entries_exactly()}
    said |= rates("stored", load.chains() * load.holders * load.blocks, used)
    said |= call_us("found", tree.find_matches, prompts) | call_us("absent", tree.find_matches, absent)
    used = applied(lambda number: removed(load, number), load.removed_chains(), lambda one: tree.apply_event(*one))
    said |= rates("removed", len(load.removed_chains()) * load.holders * (load.blocks // 2), used)
    said |= call_us("clear", tree.clear_all_blocks, list(range(0, load.workers, 10)))
    print(json.dumps(said))


if __name__ == "__main__":
    main()
