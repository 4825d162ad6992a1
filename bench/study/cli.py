"""Placement in virtual time on one trace or workload: ``python -m bench.study.cli replay TRACE``, ``tune`` and ``policies``.

The measured study with its page is ``python -m bench.study`` (``make bench-replay``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Annotated, NoReturn, cast, get_args

import msgspec
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bench.policies.systems import UnknownPolicyError, names, parse, sweep_of
from bench.study.bound import upper_bound
from bench.study.experiment import Setting, find_knee, run
from bench.study.results import Result, Slo, draw, save, table_of
from bench.study.tuning import FROZEN, TUNED, Budget, Frozen, Tuned, write_frozen
from bench.study.tuning import tune as tuned_systems
from bench.study.workloads import NAMES, generate, opened
from replay.profile import PROFILES, Profile
from replay.split import Split, SplitError, split_of
from replay.traces import Request, TraceError, at_load, read_trace
from services.launcher.system.options import parse_bytes
from services.worker.engines.simulated.core.step_models import StepModelName

ALL = names()
KNEE_OF = ["mooncake", "dynamo", "llm-d", "sglang"]
"""The knee is where the best of these no longer keeps the target."""
KNEE = "knee"
REQUESTS_MADE = 5_000
"""Of a workload, unless another number is given."""
OF_THE_KNEE = {"light": 0.5, KNEE: 1.0, "overload": 1.3}

app = typer.Typer(
    no_args_is_help=True, help="Placement policies in virtual time, on one trace.", pretty_exceptions_enable=False
)
WIDTH_OF_FILES = 200
"""Columns of a table that goes into a file or a pipe."""
screen = Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES)
ProfileName = StrEnum("ProfileName", {name: name for name in PROFILES})
DEFAULT_PROFILE = ProfileName("8b")
DEFAULT_FLEET = "8B"
StepModel = StrEnum("StepModel", {name: name for name in get_args(StepModelName)})
DEFAULT_STEP_MODEL = StepModel("linear")


REPLAY_HELP = """Replay a trace of requests against a simulated fleet, in virtual time.

Compares Baton's placement with other systems' policies, on the same
engines and with the same information.

A trace arrives as it was recorded, --loads times as fast. A workload is
made from published statistics, named in bench/study/workloads.py:

conversations  people and a chatbot, histories that grow
agents         tool agents: hot shared prefixes, many quick steps
code           code completion: repository prefixes, short answers
reasoning      short questions, heavy-tailed outputs
extracts       independent prompts in bursts, short answers
documents      conversations, some of which begin with a long document
tenants        the first four side by side, code in bursts

Its sessions are closed loops: a turn is sent a think time or a tool's
time after the answer before it. The load makes sessions start faster.

How long the engines' steps take, as in simulated workers:

--step-model linear    the profile's times add up, as the router's speed
                       learner assumes
--step-model roofline  the longer of compute and memory, with overheads
--step-model table     published measurements of vLLM's kernels on an H100,
                       interpolated (8b only; see step_models.py)

For example:

replay agents --limit 20000 --loads 4 --noise 0.1 --slow 1:0.6
replay conversations --fleet 4B --fleet 16B --fleet 4P+12D --host-blocks 4000
"""


TraceArgument = Annotated[
    str,
    typer.Argument(
        metavar="TRACE|WORKLOAD",
        help=f"Mooncake's .jsonl or Azure's .csv, or a workload made by --seed: {', '.join(NAMES)}.",
    ),
]
FleetOption = Annotated[str, typer.Option(help="Workers by role, such as 8B or 2P+6D.")]
FleetsOption = Annotated[
    list[str] | None, typer.Option("--fleet", help="Workers by role, such as 8B (the default) or 2P+6D. Repeatable.")
]
ProfileOption = Annotated[ProfileName, typer.Option(help="How fast the engines are; see replay/profile.py.")]
KvBlocksOption = Annotated[int, typer.Option(help="Blocks of 512 tokens in each KV cache; 0: the profile's.")]
HostBlocksOption = Annotated[
    int, typer.Option(help="Further blocks in each worker's host memory, loaded at 50 GB/s; 0: none.", min=0)
]
HostMemoryOption = Annotated[
    str,
    typer.Option(
        help="Memory of a store on each host of 8 workers, such as 256GiB, which copies what engines are about to "
        "evict; 0: none."
    ),
]
StepModelOption = Annotated[StepModel, typer.Option(help="How long engine steps take; see below.")]
NoiseOption = Annotated[
    float, typer.Option(help="Standard deviation of the logarithm of step times, by --seed.", min=0, max=1)
]
SlowOption = Annotated[
    list[str] | None, typer.Option(help="A slow worker, as NUMBER:SPEED; 1:0.6 runs the second at 60 %. Repeatable.")
]
PolicyOption = Annotated[
    list[str] | None, typer.Option(help="Again for each; all by default. See the command policies.")
]
LoadsOption = Annotated[
    str,
    typer.Option(
        help="Speeds of the trace (of a workload: about so many requests/s), or light,knee,overload: "
        "0.5, 1 and 1.3 knees."
    ),
]
KneeOption = Annotated[float, typer.Option(help="Where the knee is, if that is known: saves looking for it.", min=0)]
SweepOption = Annotated[
    bool, typer.Option(help="Vary each baseline's main parameter, too; at the knee, if that is among the loads.")
]
HoursOption = Annotated[float, typer.Option(help="Of the trace; 0: all of it.", min=0)]
LimitOption = Annotated[
    int, typer.Option(help=f"Requests of the trace; 0: all of them, and of a workload {REQUESTS_MADE:,}.", min=0)
]
OpenLoopOption = Annotated[
    bool, typer.Option("--open-loop", help="Later turns of a workload's sessions do not wait for answers.")
]
SloTtftOption = Annotated[float, typer.Option(help="Seconds to the first token.")]
SloItlOption = Annotated[float, typer.Option(help="Seconds between tokens, on average over a request.")]
SeedOption = Annotated[int, typer.Option(help="Of all that is random.")]
OutOption = Annotated[Path | None, typer.Option(help="A folder for results.md, results.json and the pictures.")]
TunedTraceArgument = Annotated[str, typer.Argument(metavar="TRACE|WORKLOAD", help="As for replay.")]
TunedLoadsOption = Annotated[str, typer.Option(help="Speeds of the trace, or of a workload about so many requests/s.")]
PointsOption = Annotated[int, typer.Option(help="For each system; its defaults are the first.", min=1)]
TunedPolicyOption = Annotated[
    list[str] | None, typer.Option(help="Again for each; those of bench/study/tuning.py by default.")
]
TunedLimitOption = Annotated[int, typer.Option(help="Requests of the trace; 0: all of them.", min=0)]
TunedSeedOption = Annotated[int, typer.Option(help="Of all that is random, the points too.")]
JobsOption = Annotated[int, typer.Option(help="Processes.", min=1)]
FrozenOption = Annotated[Path, typer.Option(help="Where the choices go.")]


@app.command(name="replay", help=REPLAY_HELP)
def replay_command(  # noqa: PLR0917  # one parameter per option is how the command line is declared
    trace: TraceArgument,
    fleet: FleetsOption = None,
    profile: ProfileOption = DEFAULT_PROFILE,
    kv_blocks: KvBlocksOption = 0,
    host_blocks: HostBlocksOption = 0,
    host_memory: HostMemoryOption = "0",
    step_model: StepModelOption = DEFAULT_STEP_MODEL,
    noise: NoiseOption = 0.0,
    slow: SlowOption = None,
    policy: PolicyOption = None,
    loads: LoadsOption = "1",
    knee: KneeOption = 0.0,
    sweep: SweepOption = False,
    hours: HoursOption = 0.0,
    limit: LimitOption = 0,
    open_loop: OpenLoopOption = False,
    slo_ttft: SloTtftOption = 5.0,
    slo_itl: SloItlOption = 0.1,
    seed: SeedOption = 0,
    out: OutOption = None,
) -> None:
    """Replay a trace of requests against a simulated fleet, in virtual time."""
    policies = policy or ALL
    refuse_unknown(policies)
    swept = [one for name in policies for one in sweep_of(name)] if sweep else []
    splits = [fleet_of(text) for text in fleet or [DEFAULT_FLEET]]
    requests = requests_of(trace, seed, hours, limit, is_open=open_loop)
    for split in splits:
        setting = Setting(
            requests=requests,
            split=split,
            profile=profile_of(
                profile,
                kv_blocks,
                step_model=cast("StepModelName", step_model.value),
                noise=noise,
                host_blocks=host_blocks,
            ),
            slo=Slo(ttft_s=slo_ttft, itl_s=slo_itl),
            seed=seed,
            slow=speeds_of(slow or [], len(split.roles())),
            host_memory_bytes=memory_of(host_memory),
        )
        found = find_loads(setting, loads, knee)
        runs = [
            (name, load, f"{split.short}, {label}" if len(splits) > 1 else label)
            for label, load in found
            for name in [*policies, *(swept if label in where(found) else [])]
        ]
        run_and_show(setting, runs, out / split.short if out is not None and len(splits) > 1 else out)


def run_and_show(setting: Setting, runs: list[tuple[str, float, str]], out: Path | None) -> None:
    """The results, on the screen, and in the folder if there is one."""
    results: list[Result] = []
    for result in run_all(setting, runs):
        results.append(result)
        if out is not None:
            save(results, out)  # an interrupted run keeps what is done
    for label in dict.fromkeys(result.label for result in results):
        same = [result for result in results if result.label == label]
        screen.print(table_of(same))
        screen.print(bound_of(setting, same[0].load))
    if out is not None:
        write(results, out)


def bound_of(setting: Setting, load: float) -> str:
    """What no policy exceeds."""
    requests = at_load(setting.requests, load)
    bound = upper_bound(requests, setting.split, setting.profile, setting.slo, slow=setting.slow)
    return f"No schedule exceeds {bound.requests_per_s:.3f} requests/s and {bound.tokens_per_s:.0f} tokens/s in time."


@app.command()
def tune(  # noqa: PLR0917  # one parameter per option is how the command line is declared
    trace: TunedTraceArgument,
    loads: TunedLoadsOption,
    points: PointsOption = 12,
    fleet: FleetOption = DEFAULT_FLEET,
    profile: ProfileOption = DEFAULT_PROFILE,
    policy: TunedPolicyOption = None,
    limit: TunedLimitOption = 2000,
    slo_ttft: SloTtftOption = 5.0,
    slo_itl: SloItlOption = 0.1,
    seed: TunedSeedOption = 0,
    jobs: JobsOption = 1,
    out: FrozenOption = FROZEN,
) -> None:
    """Tune each system's parameters with the same budget, by goodput, and freeze the choices in a file."""
    policies = policy or TUNED
    refuse_unknown(policies)
    speeds = [load_of(one.strip()) for one in loads.split(",")]
    split = fleet_of(fleet)
    setting = Setting(
        requests=requests_of(trace, seed, 0.0, limit, is_open=False),
        split=split,
        profile=profile_of(profile, 0),
        slo=Slo(ttft_s=slo_ttft, itl_s=slo_itl),
        seed=seed,
    )
    budget = Budget(
        trace=Path(trace).name,
        trace_sha256=sha256(Path(trace).read_bytes()).hexdigest() if Path(trace).exists() else "",
        requests=len(setting.requests),
        loads=speeds,
        workers={role: count for role, count in msgspec.structs.asdict(split).items() if count},
        profile=profile.value,
        slo=setting.slo,
        seed=seed,
        points=points,
    )
    systems: dict[str, Tuned] = {}
    for name, tuned in tuned_systems(setting, speeds, policies, points, jobs):
        systems[name] = tuned
        gain = f"{100 * tuned.default_score:.1f} % -> {100 * tuned.score:.1f} %"
        screen.print(f"{parse(name).named(tuned.values)}: {gain}", markup=False, highlight=False)
        write_frozen(Frozen(budget=budget, systems=systems), out)  # an interrupted run keeps what is done
    screen.print(str(out), markup=False, soft_wrap=True)


@app.command()
def policies() -> None:
    """List all policies, and the parameters that --sweep varies."""
    for name in ALL:
        screen.print(name, *sweep_of(name), sep="  ", markup=False)


def refuse_unknown(policies: list[str]) -> None:
    """Exit for a policy that does not exist."""
    for name in policies:
        try:
            parse(name)
        except UnknownPolicyError as error:
            fail(f"{error} See also the command policies.")


def requests_of(trace: str, seed: int, hours: float, limit: int, *, is_open: bool) -> list[Request]:
    """The requests to replay; exits if there are none."""
    if trace in NAMES and not Path(trace).exists():
        made = cut(generate(trace, limit or REQUESTS_MADE, seed=seed), hours=hours)
        return opened(made) if is_open else made
    try:
        requests = cut(read_trace(Path(trace), seed=seed), hours=hours, limit=limit)
    except OSError as error:
        fail(f"{trace} cannot be read ({error.strerror}), and is none of the workloads {', '.join(NAMES)}.")
    except (TraceError, UnicodeDecodeError) as error:
        fail(f"This trace cannot be read: {error}")
    if not requests:
        fail("Nothing of the trace is left to replay.")
    return requests


def cut(requests: list[Request], *, hours: float = 0.0, limit: int = 0) -> list[Request]:
    """The beginning of a trace; 0: all of it."""
    kept = [request for request in requests if not hours or request.at_s < hours * 3600]
    return kept[:limit] if limit else kept


def fleet_of(text: str) -> Split:
    """Exits for a fleet that cannot serve."""
    try:
        return split_of(text)
    except SplitError as error:
        fail(f"--fleet: {error}.")


def memory_of(text: str) -> int:
    """Bytes; exits for what is no size."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        fail(f"--host-memory: {error}.")


def speeds_of(slow: list[str], workers: int) -> dict[int, float]:
    """The speeds of slow workers; exits for what is none."""
    found = {}
    for text in slow:
        number, _colon, speed = text.partition(":")
        try:
            found[int(number)] = float(speed)
        except ValueError:
            fail(f"--slow: {text!r} is not NUMBER:SPEED, such as 1:0.6.")
        if not (0 <= int(number) < workers and 0.0 < float(speed) < math.inf):
            fail(f"--slow: {text!r} names no worker from 0 to {workers - 1}, or no positive speed.")
    return found


def profile_of(
    name: str, kv_blocks: int, *, step_model: StepModelName = "linear", noise: float = 0.0, host_blocks: int = 0
) -> Profile:
    """The named profile, with another cache size if given; exits for the table's speeds with another model."""
    if step_model == "table" and name != DEFAULT_PROFILE:
        fail(f"--step-model table was measured of an 8b model, not of {name}: take linear or roofline.")
    profile = replace(PROFILES[name], step_model=step_model, noise=noise, host_blocks=host_blocks)
    return replace(profile, kv_blocks=kv_blocks) if kv_blocks > 0 else profile


def run_all(setting: Setting, runs: list[tuple[str, float, str]]) -> Iterator[Result]:
    """Run all (policy, load, label), with a progress bar each."""
    with bars() as progress:
        for policy, load, label in runs:
            task = progress.add_task(f"{label}: {policy}", total=len(setting.requests))

            def arrived(number: int, task: TaskID = task) -> None:
                progress.update(task, completed=number + 1)

            yield run(setting, policy, load, label, arrived)
            progress.remove_task(task)


def bars() -> Progress:
    """Transient progress bars."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=screen, transient=True)


def where(loads: list[tuple[str, float]]) -> set[str]:
    """Labels of the loads at which parameters are varied."""
    labels = {label for label, _load in loads}
    return labels & {KNEE} or labels


def find_loads(setting: Setting, loads: str, knee: float) -> list[tuple[str, float]]:
    """Labels and speeds."""
    labels = [part.strip() for part in loads.split(",") if part.strip()]
    if not knee and any(label in OF_THE_KNEE for label in labels):
        knee = knee_of(setting)
    return [(one, knee * OF_THE_KNEE[one] if one in OF_THE_KNEE else load_of(one)) for one in labels] or [("1", 1.0)]


def knee_of(setting: Setting) -> float:
    """Where the best baseline's p95 of TTFT reaches the target."""
    with bars() as progress:
        task = progress.add_task("looking for the knee", total=None)
        return find_knee(setting, KNEE_OF, lambda result: progress.update(task, description=searched(result)))


def searched(result: Result) -> str:
    """For the bar."""
    return f"looking for the knee: {result.policy} at {result.load:.3g}: p95 {result.ttft.p95:.2f} s"


def load_of(text: str) -> float:
    """Parse a positive number."""
    try:
        load = float(text)
    except ValueError:
        load = 0.0
    if not 0.0 < load < float("inf"):
        fail(f"--loads: {text!r} is neither a positive number nor one of {', '.join(OF_THE_KNEE)}.")
    return load


def write(results: list[Result], out: Path) -> None:
    """Tables, numbers and pictures."""
    paths = save(results, out)
    paths += draw(results, out)
    for path in paths:
        screen.print(str(path), markup=False, soft_wrap=True)


def fail(message: str) -> NoReturn:
    """Print an error and exit."""
    Console(stderr=True, soft_wrap=True).print(message, style="red", markup=False)
    raise typer.Exit(2)


if __name__ == "__main__":
    app(prog_name="python -m bench.study.cli")
