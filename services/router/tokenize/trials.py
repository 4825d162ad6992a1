"""Has workers' tokenizers and chat templates tried in a child process (``trial``), which may hang or die of them.

A worker sends its tokenizer and template to every router: one whose regular expressions backtrack, or whose normalizer
multiplies a text, would hold or end all of them. The child has bounds of CPU time and memory; the router bounds its
time. Children run one at a time, and their results are kept by a digest of what was tried. What has passed is not
tried again by a router that starts later on the same machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from typing import Final, NamedTuple

import msgspec

from services.router.tokenize.passed_trials import PassedTrials
from shared.contracts.control import TokenizerAsset
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.message import Message
from shared.contracts.workers import HashScheme

TRIAL_S_MAX: Final = 60.0
"""Time limit for a child, which the router enforces. A loaded machine may need many times a trial's CPU time."""
VERDICTS_MAX: Final = 256
"""Results that are kept; beyond that, the oldest is dropped."""
REASON_CHARS_MAX: Final = 200

TEMPLATE, TOKENIZER, DONE = "template", "tokenizer", "done"
"""What a child begins to try, one a line, with a reason where it refuses it; ``DONE`` ends its output."""
CHILD: Final = (sys.executable, "-m", "services.router.tokenize.trial")
INHERITED: Final = ("PATH", "LANG", "LC_ALL", "TZ", "BATON_COMPILED", "PYTHONDONTWRITEBYTECODE")
"""A child's environment, which has no secrets."""


class Candidate(Message, frozen=True, kw_only=True):
    """What a child tries. ``chars_max``: of a rendered chat."""

    asset: TokenizerAsset
    scheme: HashScheme
    chars_max: int


class Verdict(NamedTuple):
    """Why a router must not use the tokenizer, or the template alone; empty where it may."""

    tokenizer: str = ""
    template: str = ""


class Trials:
    """The trials of one router. ``close`` ends the child that runs."""

    def __init__(self, passed: PassedTrials | None = None, s_max: float = TRIAL_S_MAX) -> None:
        self._passed = passed
        self._s_max = s_max
        self._verdicts: dict[bytes, Verdict] = {}
        self._turn = asyncio.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True
        child = self._child
        if child is not None:
            child.kill()

    async def verdict(self, asset: TokenizerAsset, scheme: HashScheme, chars_max: int) -> Verdict:
        """Whether a router may use what the asset contains."""
        anonymous = msgspec.structs.replace(asset, worker_id=WorkerId(""), epoch=Epoch(0), note="")
        seedless = HashScheme(
            block_size=scheme.block_size, algorithm=scheme.algorithm
        )  # The seed changes with weights.
        encoded = msgspec.msgpack.encode(Candidate(asset=anonymous, scheme=seedless, chars_max=chars_max))
        key = hashlib.sha256(encoded).digest()
        async with self._turn:
            verdict = self._verdicts.get(key)
            if verdict is None:
                verdict = await asyncio.to_thread(self._known_or_tried, encoded)
                if len(self._verdicts) >= VERDICTS_MAX:
                    del self._verdicts[next(iter(self._verdicts))]
                self._verdicts[key] = verdict
            return verdict

    def _known_or_tried(self, encoded: bytes) -> Verdict:
        """In a thread."""
        if self._passed is not None and self._passed.has(encoded):
            return Verdict()
        verdict = self._try(encoded)
        if self._passed is not None and verdict == Verdict():
            self._passed.add(encoded)
        return verdict

    def _try(self, encoded: bytes) -> Verdict:
        last, template = self._run(encoded)
        if last == TEMPLATE:
            # The child ended of the template: the tokenizer may be good without it.
            template = f"the process that tried it {_ended()}"
            candidate = msgspec.msgpack.decode(encoded, type=Candidate)
            asset = msgspec.structs.replace(candidate.asset, chat_template="")
            last, _ = self._run(msgspec.msgpack.encode(msgspec.structs.replace(candidate, asset=asset)))
        if last == DONE:
            return Verdict(template=template)
        why = last.removeprefix(TOKENIZER).strip() or f"the process that tried it {_ended()}"
        return Verdict(tokenizer=why, template=template)

    def _run(self, encoded: bytes) -> tuple[str, str]:
        """A child's last line, and why it refused the template."""
        kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
        environment = {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"}
        pipe = subprocess.PIPE
        with subprocess.Popen(CHILD, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment) as child:
            self._child = child
            try:
                if self._is_closed:
                    child.kill()
                said, _ = child.communicate(encoded, self._s_max)
            except subprocess.TimeoutExpired:
                child.kill()
                said, _ = child.communicate()
            self._child = None
        lines = said.decode(errors="replace").splitlines()
        refused = (line.removeprefix(TEMPLATE).strip() for line in lines if line.startswith(TEMPLATE))
        return lines[-1] if lines else "", next(filter(None, refused), "")


def _ended() -> str:
    return "took too long or too much memory, or died"


def reason(error: BaseException) -> str:
    """One line of an error that a worker's tokenizer or template made."""
    text = " ".join("".join(char if char.isprintable() else " " for char in str(error)[:REASON_CHARS_MAX]).split())
    return f"{type(error).__name__}: {text}"
