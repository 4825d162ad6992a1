"""Decisions of Dynamo's KV selector, in an interpreter that has the PyPI package ai-dynamo-runtime (1.6.1 or later):
``PYTHON bench/peer_selector.py < scenario.json`` prints one JSON line for each arrival of a ``peer_scenario``.

``SelectionService`` is the router's own selection core in one process: no network, no engine. Without KV events it takes
a prompt that was sent to a worker as cached there, so that a scenario needs no event publisher. Settings come as DYN_*
variables.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

os.environ["DYN_ROUTER_USE_KV_EVENTS"] = "false"
os.environ.setdefault("DYN_LOG", "error")

from dynamo._core import SelectionService  # type: ignore[import-not-found]  # reads the variables

UNIQUE_FROM = 1 << 30
"""First token id of what follows the full blocks of a prompt."""


def tokens_of(number: int, blocks: list[int], tokens: int, block_tokens: int) -> list[int]:
    """Equal blocks, equal tokens; the rest of the prompt is its own."""
    full = [block * block_tokens + index for block in blocks for index in range(block_tokens)]
    return full + [UNIQUE_FROM + number * block_tokens + index for index in range(tokens - len(full))]


async def state(service: Any, prompt: dict[str, Any]) -> dict[str, list[int]]:
    loads = {one["worker_id"]: one for one in await service.potential_loads(prompt)}
    overlaps = {one["worker_id"]: one for one in (await service.overlap_scores(prompt))["workers"]}
    ids = sorted(loads)
    return {
        "prefill_tokens": [loads[one]["potential_prefill_tokens"] for one in ids],
        "decode_blocks": [loads[one]["potential_decode_blocks"] for one in ids],
        "overlap_blocks": [overlaps[one]["device_blocks"] for one in ids],
    }


async def decide(scenario: dict[str, Any]) -> None:
    service = SelectionService(indexer_threads=1)
    size = scenario["block_tokens"]
    for worker in range(scenario["workers"]):
        endpoint = f"http://127.0.0.1:{worker + 1}"  # never connected to
        record = {"worker_id": worker, "endpoint": endpoint, "block_size": size, "max_num_batched_tokens": 2048}
        await service.upsert_worker(record)
    for step in scenario["steps"]:
        number = step["number"]
        if step["kind"] == "arrives":
            prompt = {"token_ids": tokens_of(number, step["blocks"], step["tokens"], size)}
            said = await state(service, prompt)
            chosen = await service.select_and_reserve({**prompt, "selection_id": str(number)})
            print(json.dumps({"number": number, "worker": chosen["worker_id"], **said}), flush=True)
        elif step["kind"] == "computed":
            await service.prefill_complete(str(number))
        else:
            await service.free_reservation(str(number))
    service.shutdown()


if __name__ == "__main__":
    asyncio.run(decide(json.load(sys.stdin)))
