"""However often a stream breaks off, and wherever: its client gets every byte once and in order, or a beginning of the
answer and one error event. Nothing else, and nothing twice.
"""

from __future__ import annotations

import asyncio

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.router.relay.failure_policy import FailurePolicy
from services.router.relay.suspects import DEATHS_MAX
from shared.bus.frame_sender import LegFrames
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import StartLeg
from tests.support.examples import examples
from tests.unit.router.fake_worker import DONE, FakeWorker
from tests.unit.router.streams import ANSWER, ROLE, TOKENS, event, streams
from tests.unit.router.world import World, prompt, run_in_world

RESUMES_MAX = 3
WORKERS = 6
SILENCE = None
ENDS = st.sampled_from(
    [Reason.WORKER_LOST, Reason.ENGINE_DEAD, Reason.WORKER_DRAINING, Reason.FRAMES_LOST, Reason.WORKER_BUSY, SILENCE]
)
PIECES = [ROLE, *(event(number) for number in range(len(TOKENS)))]
BEGINNINGS = {b"".join(PIECES[:number]) for number in range(len(PIECES) + 1)}


class Breaks:
    """What happens to each leg, whoever serves it: so many new tokens, and then its end. Later legs end well."""

    def __init__(self, breaks: list[tuple[int, Reason | None]]) -> None:
        self._breaks = list(breaks)
        self.legs = 0

    def __call__(self, worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        self.legs += 1
        if not self._breaks:
            streams()(worker, start, frames)
            return
        tokens, reason = self._breaks.pop(0)

        def ends(frames: LegFrames) -> None:
            if reason is not SILENCE:
                frames.fail(Failure(reason=reason, message="as drawn"))

        streams(tokens, ends)(worker, start, frames)


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(TOKENS)), ENDS), max_size=6))
@example([(0, Reason.WORKER_LOST), (0, Reason.WORKER_LOST), (0, Reason.WORKER_LOST), (0, Reason.WORKER_DRAINING)])
def test_a_stream_is_delivered_once_and_whole_or_ends_with_one_error(breaks):
    async def scenario(world: World) -> None:
        script = Breaks(breaks)
        for number in range(WORKERS):
            await world.worker(f"w{number}", script=script)

        answer = await world.ask(prompt(stream=True), x_baton_mode="aggregated")
        await asyncio.sleep(1)

        excused = sum(reason is Reason.WORKER_DRAINING for _tokens, reason in breaks)  # They count against no limit.
        assert script.legs <= RESUMES_MAX + 1 + excused
        deaths = sum(reason is Reason.ENGINE_DEAD for _tokens, reason in breaks)
        if len(breaks) <= RESUMES_MAX and deaths <= DEATHS_MAX:  # After more deaths no engine gets the request.
            assert answer.body == ANSWER
        elif answer.body != ANSWER:
            said, sign, rest = answer.body.partition(b'data: {"error":')
            assert sign, "neither whole nor an error"
            assert said in BEGINNINGS
            assert rest.count(b"\n\n") == 1
        assert DONE not in answer.body.removesuffix(DONE)
        views = world.router.fleet.cluster.workers.values()
        assert {(view.own.legs, view.own.tokens) for view in views} == {(0, 0)}
        assert not world.router.inbox._legs

    run_in_world(scenario, failures=FailurePolicy(resumes_max=RESUMES_MAX, attempts_max=10), frame_gap_s_max=2.0)
