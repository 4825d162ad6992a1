"""Small traces and fleets for tests of the replay."""

from __future__ import annotations

import json
import random
from dataclasses import replace

from bench.policies.base import PolicyContext
from bench.policies.systems import BASELINES
from bench.policies.world import PolicyWorld
from replay.profile import PROFILES, Profile
from replay.split import Split
from replay.traces import Request

PROFILE = replace(PROFILES["8b"], kv_blocks=60, max_num_seqs=16, prefill_tokens_per_s=20_000.0)
THREE = Split(both=3)


def conversations(count: int, *, seed: int = 1, per_s: float = 4.0) -> list[Request]:
    """Turns of some conversations, each with the blocks of the turns before it."""
    rng = random.Random(seed)
    histories: dict[int, list[int]] = {}
    at_s, made = 0.0, []
    for number in range(count):
        at_s += rng.expovariate(per_s)
        blocks = histories.setdefault(rng.randrange(12), [0])
        if len(blocks) > 12:
            del blocks[1:]
        blocks += [1000 * number + index for index in range(rng.randint(1, 3))]
        tokens = 512 * len(blocks) + rng.randint(1, 500)
        made.append(Request(at_s, tuple(blocks), tokens, rng.randint(1, 120)))
    return made


def write_mooncake(path, requests):
    rows = [
        {
            "timestamp": 3000 * int(request.at_s / 3),
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": [*request.blocks, 10**9 + number],
        }
        for number, request in enumerate(requests)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def world(split: Split = THREE, profile: Profile = PROFILE) -> PolicyWorld:
    return PolicyWorld(split, profile)


def context(of: PolicyWorld, seed: int = 1) -> PolicyContext:
    return PolicyContext(fleet=of.fleet, counts=of.counts, profile=of.profile, slo_ttft_s=5.0, slo_itl_s=0.1, seed=seed)


def with_baseline(of: PolicyWorld, name: str, seed: int = 1) -> PolicyWorld:
    of.fleet.placer = BASELINES[name](context(of, seed))
    return of
