"""What it is worth that the planner moves a worker: goodput while the load turns from prompts to answers; writes
docs/benchmarks/role-shift.md.

Four simulated workers behind a router, each a process. Half of the time requests have long prompts and short answers,
then short prompts and long answers. Fixed fleets get the same requests at the same instants as one that an orchestrator
plans. Eight minutes; ``--quick`` two, without the page.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import uvloop

from bench.bench_live_replay import MAX_PAYLOAD_BYTES, process, until_exact
from bench.kv_bench_page import commit, machine, table
from bench.live_client import Outcome, replay
from bench.study.results import Slo
from replay.split import Split
from replay.spread import spread_of
from replay.traces import Request
from services.launcher.bus_client import ask_service
from shared.contracts.channels import PLANS
from shared.contracts.planning import AskPlans, PlanAction, PlanDecision
from shared.text.fleet_text import plan_text
from tests.support.nats_server import NatsServer, free_port

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "role-shift.md"
ENGINE = "prefill_tokens_per_s=2000,decode_base_s=0.03,decode_per_sequence_s=0.005,kv_bytes_per_token=128"
SLO = Slo(ttft_s=2.0, itl_s=0.08)
SETTLE_S = 3.0
PLANS_MAX = 1000
SHIFT_SHARE = 0.4
"""Part of the second phase in which the fleet may still change: the page shows it apart."""
WORKERS = 4


@dataclass(frozen=True)
class Phase:
    """Requests of one kind, at random instants."""

    name: str
    rate: float
    prompt_tokens: int
    answer_tokens: int


PROMPTS = Phase("prompts", rate=4.5, prompt_tokens=1000, answer_tokens=8)
ANSWERS = Phase("answers", rate=3.5, prompt_tokens=100, answer_tokens=100)


@dataclass(frozen=True)
class Fleet:
    split: Split
    planned: bool = False

    @property
    def name(self) -> str:
        name = f"{self.split.prefill}P+{self.split.decode}D"
        return f"{name}, planned" if self.planned else name


FLEETS = (
    *(Fleet(Split(prefill=prefill, decode=WORKERS - prefill)) for prefill in (1, 2, 3)),
    Fleet(Split(prefill=3, decode=1), planned=True),
)


@dataclass
class Ran:
    fleet: Fleet
    outcomes: list[Outcome]
    changes: list[tuple[float, PlanDecision]] = field(default_factory=list)
    """What the planner changed, and how many seconds after the load turned it decided so."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=50.0, help="of each phase")
    parser.add_argument("--time-scale", type=float, default=0.2, help="ORCHESTRATOR_PLANNER_TIME_SCALE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a third of the time, two fleets, no page")
    options = parser.parse_args()
    fleets = FLEETS[-2:] if options.quick else FLEETS
    seconds, scale = (20.0, 0.1) if options.quick else (options.seconds, options.time_scale)
    requests = [*arrivals(options.seed, seconds)]
    ran = []
    for fleet in fleets:
        ran.append(run(fleet, requests, seconds, scale))
        print(f"{fleet.name}: {' '.join(row(ran[-1], seconds)[1:])}", flush=True)
    text = page(ran, seconds, scale, len(requests))
    print(text)
    if not options.quick:
        PAGE.write_text(text)
    failed = [one for each in ran for one in each.outcomes if one.status not in (200, 429, 503)]
    print(f"{len(failed)} requests failed other than by a rejection")
    return 1 if failed else 0


def arrivals(seed: int, seconds: float) -> Iterator[Request]:
    dice = random.Random(seed)
    for number, phase in enumerate((PROMPTS, ANSWERS)):
        at_s = number * seconds + dice.expovariate(phase.rate)
        while at_s < (number + 1) * seconds:
            yield Request(at_s, (), phase.prompt_tokens, phase.answer_tokens)
            at_s += dice.expovariate(phase.rate)


def run(fleet: Fleet, requests: list[Request], turn_s: float, scale: float) -> Ran:
    """All requests on fresh processes."""
    with tempfile.TemporaryDirectory() as made, ExitStack() as running:
        folder, port = Path(made), free_port()
        nats = running.enter_context(NatsServer(folder, max_payload=MAX_PAYLOAD_BYTES, has_buckets=True))
        common = {"BATON_NATS_URL": nats.url, "BATON_LOG_LEVEL": "warning", "BATON_STATE_DIR": made}
        planner = {
            "ORCHESTRATOR_PLANNER": "act" if fleet.planned else "off",
            "ORCHESTRATOR_PLANNER_TTFT_S": str(SLO.ttft_s),
            "ORCHESTRATOR_PLANNER_ITL_S": str(SLO.itl_s),
            "ORCHESTRATOR_PLANNER_TIME_SCALE": str(scale),
        }
        running.enter_context(process("orchestrator", folder, ["services.orchestrator"], {**common, **planner}))
        for number in range(WORKERS):
            role = "prefill" if number < fleet.split.prefill else "decode"
            own = {"WORKER_WORKER_ID": f"w{number}", "WORKER_ROLE": role}
            settings = {**common, **own, "WORKER_ENGINE": "simulated", "WORKER_SIMULATED": ENGINE}
            running.enter_context(process(f"w{number}", folder, ["services.worker"], settings))
        slos = json.dumps({"default": {"ttft_s": SLO.ttft_s, "itl_s": SLO.itl_s}})
        router = {"ROUTER_PORT": str(port), "ROUTER_LOG_REQUESTS": "false", "ROUTER_SLOS": slos}
        running.enter_context(process("router", folder, ["services.router"], {**common, **router}))
        until_exact(port, WORKERS)
        time.sleep(SETTLE_S)
        turned_ms = (time.time() + turn_s) * 1000
        outcomes = uvloop.run(replay(requests, port, lambda _sent: None))
        if not fleet.planned:
            return Ran(fleet, outcomes)
        asking = ask_service(nats.url, PLANS, AskPlans(count_max=PLANS_MAX), s_max=5.0, missing="no planner")
        decisions = sorted(asyncio.run(asking).decisions, key=lambda each: each.number)
        changes = [
            each for each in decisions if each.action is not PlanAction.NOTHING and "legs went on" in each.outcome
        ]
        return Ran(fleet, outcomes, [((each.at_ms - turned_ms) / 1000, each) for each in changes])


def row(ran: Ran, turn_s: float) -> list[str]:
    """Goodput before the load turns, while the fleet may adapt, and afterwards."""
    settled_s = turn_s * (1 + SHIFT_SHARE)
    spans = ((0.0, turn_s), (turn_s, settled_s), (settled_s, 2 * turn_s), (0.0, 2 * turn_s))
    last = [one for one in ran.outcomes if settled_s <= one.request.at_s]
    ttft = spread_of([one.ttft_s for one in last if one.well], sum(not one.well for one in last))
    itl = spread_of([one.tpot_s for one in last if one.well], sum(not one.well for one in last))
    refused = sum(one.status in (429, 503) for one in ran.outcomes)
    shown = [f"{good_share(ran.outcomes, *span):.0%}" for span in spans]
    return [ran.fleet.name, *shown, seconds(ttft.p95), milliseconds(itl.p95), str(refused)]


def good_share(outcomes: Sequence[Outcome], from_s: float, to_s: float) -> float:
    """Share of the requests of that time which met both targets; rejected ones did not."""
    mine = [one for one in outcomes if from_s <= one.request.at_s < to_s]
    return sum(one.well and SLO.met_by(one.ttft_s, one.tpot_s) for one in mine) / len(mine)


def seconds(value: float) -> str:
    return f"{value:.2f}" if value < float("inf") else "refused"


def milliseconds(value: float) -> str:
    return f"{value * 1000:.0f}" if value < float("inf") else "refused"


HEAD = "fleet | before | shift | after | all | TTFT p95 s, after | ITL p95 ms, after | refused"


def page(ran: Sequence[Ran], turn_s: float, scale: float, requests: int) -> str:
    settled_s = SHIFT_SHARE * turn_s
    lines = [
        "# A worker changes its role as the load changes",
        "",
        (
            f"`make bench-role-shift`, commit {commit()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, on {machine()}; "
            f"load average {os.getloadavg()[1]:.1f}."
        ),
        "",
        (
            f"{WORKERS} simulated workers, a router, an orchestrator and NATS, each a process, in real time. For {turn_s:g} s "
            f"{PROMPTS.rate:g} requests a second with {PROMPTS.prompt_tokens} prompt and {PROMPTS.answer_tokens} answer tokens "
            f"arrive, then for {turn_s:g} s {ANSWERS.rate:g} a second with {ANSWERS.prompt_tokens} and "
            f"{ANSWERS.answer_tokens}: {requests} requests at random instants, the same for each fleet. Good are those with "
            f"the first token within {SLO.ttft_s:g} s and the others {SLO.itl_s * 1000:g} ms apart on average, which router "
            "and planner know as targets; rejected ones are not good. The planner's times are "
            f"{scale:g} of its defaults, because here the load turns within a minute. No worker can be added. Engines: "
            f"`{ENGINE}`."
        ),
        "",
        "* before: good share of the requests that came before the load turned;",
        f"* shift: of those in the {settled_s:g} s after it, in which the planned fleet changes; after: of all later ones;",
        "* TTFT and ITL (mean of a request): of the requests of *after*.",
        "",
        *table(HEAD, [row(one, turn_s) for one in ran]),
    ]
    for one in ran:
        if one.fleet.planned:
            lines += ["", f"What the planner did with {one.fleet.name}:", ""]
            lines += [
                f"* {at:+.1f} s: {plan_text(each)}, because {each.why}; {each.outcome}" for at, each in one.changes
            ]
            lines += [] if one.changes else ["* nothing"]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
