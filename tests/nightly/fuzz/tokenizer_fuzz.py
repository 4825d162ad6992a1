"""Tokenizers and chat templates of a worker: each is tried as a router does, and what passes is used for texts that no
trial had. Neither ends the router, or holds its event loop.
"""

from __future__ import annotations

import asyncio
import os
import signal
from time import process_time

import msgspec

from services.router.request.fields import read_request
from services.router.tokenize.tokenizer import PromptTokenizer
from services.router.tokenize.trials import Trials, Verdict
from shared.contracts.control import TokenizerAsset
from shared.contracts.engine_paths import CHAT, COMPLETIONS
from shared.contracts.workers import HashScheme
from tests.nightly.fuzz.bus_fuzz import Campaign, Plan
from tests.support.mutated_tokenizers import PROMPTS, Mutant

SHARE = 1000
"""A trial takes as long as a thousand inputs of other kinds."""
SCHEME = HashScheme(block_size=32)
CHARS_MAX = 100_000
LOOP_CHARS_MAX = 4096
LOOP_S_MAX = 0.5
"""CPU time of the event loop for one prompt, of which honest tokenizers take a millisecond."""
USE_S_MAX = 30
HELD = 3
"""Exit status of a child whose event loop was held."""


def fuzz_tokenizers(plan: Plan) -> Campaign:
    campaign = Campaign("tokenizers and templates")
    for number in range(max(1, plan.count // SHARE)):
        asset = Mutant(number + plan.seed * 1_000_000).asset()
        verdict = asyncio.run(Trials().verdict(asset, SCHEME, CHARS_MAX))
        campaign.sent += 1
        campaign.heard += 1
        if not verdict.tokenizer:
            campaign.read += 1
            if status := used(asset, verdict):
                campaign.findings.append(
                    f"mutant {number} of seed {plan.seed}: it passes, and its use ends as {status}"
                )
        plan.progress(campaign.name, campaign.sent)
    return campaign


def used(asset: TokenizerAsset, verdict: Verdict) -> int:
    """Exit status of a process that reads prompts with it as the event loop does."""
    child = os.fork()
    if not child:
        signal.alarm(USE_S_MAX)
        os._exit(HELD if _slowest_s(asset, verdict) > LOOP_S_MAX else 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _slowest_s(asset: TokenizerAsset, verdict: Verdict) -> float:
    if verdict.template:
        asset = msgspec.structs.replace(asset, chat_template="")
    tokenizer = PromptTokenizer(asset, SCHEME, cache_bytes_max=1 << 20, chars_max=CHARS_MAX)
    slowest_s = 0.0
    for text in PROMPTS:
        for path, body in (
            (COMPLETIONS, {"model": "m", "prompt": text}),
            (CHAT, {"model": "m", "messages": [{"role": "user", "content": text}]}),
        ):
            facts, begun = read_request(path, msgspec.json.encode(body)), process_time()
            tokenizer.begin(facts, lambda _block: True, loop_chars_max=LOOP_CHARS_MAX)
            slowest_s = max(slowest_s, process_time() - begun)
    return slowest_s
