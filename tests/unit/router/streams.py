"""Workers that stream one fixed completion token by token, and continue it from the tokens of a resumed leg."""

from __future__ import annotations

from collections.abc import Callable

from shared.bus.frame_sender import LegFrames
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import LegKind, LegReport, StartLeg, unpack_tokens
from tests.unit.router.fake_worker import DONE, SSE, FakeWorker, Script, serve_leg

TOKENS = [7, 0, 4_000_000_000, 13, 21, 34]
ROLE = b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n'
FOREVER = 1 << 30


def event(number: int) -> bytes:
    return b'data: {"choices":[{"text":"%d"}]}\n\n' % TOKENS[number]


ANSWER = ROLE + b"".join(map(event, range(len(TOKENS)))) + DONE


def streams(breaks_after: int = FOREVER, how: Callable[[LegFrames], None] | None = None) -> Script:
    """Stream that many new tokens of the completion, then call ``how``."""

    def script(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        if start.kind is LegKind.PREFILL:
            serve_leg(worker, start, frames)
            return
        relayed = unpack_tokens(start.resume) if start.resume is not None else []
        assert relayed == TOKENS[: len(relayed)]
        frames.head(200, SSE)
        if start.resume is None:
            frames.data(ROLE)
        for number in range(len(relayed), min(len(relayed) + breaks_after, len(TOKENS))):
            frames.data(event(number), [TOKENS[number]])
        if how is not None:
            how(frames)
            return
        frames.data(DONE)
        frames.end(LegReport(prompt_tokens=9, completion_tokens=len(TOKENS)))

    return script


def fails(reason: Reason) -> Callable[[LegFrames], None]:
    return lambda frames: frames.fail(Failure(reason=reason, message="as the test wants"))


def falls_silent(_frames: LegFrames) -> None:
    """Send nothing more."""


def loses_a_frame(frames: LegFrames) -> None:
    frames._seq += 1
    frames.data(DONE)
