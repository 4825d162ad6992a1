"""``baton plan``: which fleet a workload needs. Without a workload: what the running system's planner decided."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from services.launcher.commands import views
from services.launcher.commands.options import (
    Json,
    NatsUrl,
    StateDir,
    fail,
    find_nats,
    print_json,
    reply_of,
    wide_console,
)

if TYPE_CHECKING:  # What simulates is imported when it runs: without a workload the command is as quick as others.
    from replay.capacity.layouts import Layout
    from replay.capacity.plan import Inputs
    from replay.capacity.speeds import EngineSpeeds
    from replay.capacity.trial import Runner, Target
    from replay.capacity.workload import Workload
    from replay.profile import Profile
    from replay.split import Split
    from shared.contracts.workers import Role

RUNNING = "running"
"""Stands for a file: the speeds that the running system has measured."""
SAMPLE = 2000
GPUS_MAX = 4096
LOAD = "The workload"
ENGINES = "The engines"
SEARCH = "The search"
RESULT = "The result"
DECISIONS = "Without a workload: the running planner's decisions"
EPILOG = """[bold]Examples[/]

[cyan]baton plan --trace requests.jsonl --gpus 8 --ttft 2 --itl 0.05 --picture plan.png[/]   enough?

[cyan]baton plan --rate 5/s --prompt 2000 --output 300 --speeds running[/]   how many GPUs?

[cyan]baton plan --rate 5/s --profile 70b --layout prefill=TP4xPP2 --layout decode=TP8 --gpus 24[/]   other layouts

[cyan]baton plan[/]   what the running system's planner decided and why

[bold]Traces[/]

Mooncake's JSON lines (timestamp, input_length, output_length, hash_ids), Azure's CSV (TIMESTAMP,

ContextTokens, GeneratedTokens), or the log of a router that ran with BATON_LOG_FORMAT=json.

[bold]Accuracy[/]

A simulation: requests run in virtual time through the router's own placement and admission.

docs/planning.md has its errors against live runs."""


class ProfileName(StrEnum):
    """Those of ``replay.profile``, which is imported later."""

    SMALL = "8b"
    LARGE = "70b"
    HYBRID = "80b-a3b"


GPUS = {ProfileName.SMALL: 1, ProfileName.LARGE: 4, ProfileName.HYBRID: 2}
"""GPUs of a worker with each profile."""

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)


TraceOption = Annotated[Path | None, typer.Option(help="File of requests.", rich_help_panel=LOAD)]
RateOption = Annotated[
    str, typer.Option(help="Without a trace: 5/s, 300/min or 18000/h, at random instants.", rich_help_panel=LOAD)
]
PromptOption = Annotated[int, typer.Option(help="With --rate: mean prompt tokens.", min=1, rich_help_panel=LOAD)]
OutputOption = Annotated[int, typer.Option(help="With --rate: mean output tokens.", min=1, rich_help_panel=LOAD)]
TtftOption = Annotated[float, typer.Option(help="Target: seconds to the first token.", rich_help_panel=LOAD)]
ItlOption = Annotated[
    float, typer.Option(help="Target: seconds between tokens, on average over a request.", rich_help_panel=LOAD)
]
ShareOption = Annotated[
    str, typer.Option(help="Of the requests that must meet both targets: 95% or 0.95.", rich_help_panel=LOAD)
]
GpusOption = Annotated[
    int, typer.Option(help="GPUs to plan for; 0: the fewest.", min=0, max=GPUS_MAX, rich_help_panel=ENGINES)
]
ProfileOption = Annotated[
    ProfileName,
    typer.Option(
        help="Model size; speeds from first principles. 80b-a3b: three of four layers have a recurrent state.",
        rich_help_panel=ENGINES,
    ),
]
SpeedsOption = Annotated[
    str, typer.Option(help="Measured speeds instead: a file of --export-speeds, or running.", rich_help_panel=ENGINES)
]
GpusPerWorkerOption = Annotated[
    int,
    typer.Option(
        help="With --speeds, where a worker has other GPUs than it was measured with.",
        min=0,
        show_default=False,
        rich_help_panel=ENGINES,
    ),
]
ModelOption = Annotated[str, typer.Option(help="With several running models: whose speeds.", rich_help_panel=ENGINES)]
ExportSpeedsOption = Annotated[
    Path | None,
    typer.Option(help="Write the speeds that the running system has measured, and exit.", rich_help_panel=ENGINES),
]
LayoutOption = Annotated[
    list[str] | None,
    typer.Option(
        help="GPUs of a worker: TP4xPP2 for all, or decode=TP1xDP8 for a role. Repeatable.", rich_help_panel=ENGINES
    ),
]
SplitOption = Annotated[
    list[str] | None,
    typer.Option(help="Try only this one, such as 3P+1D, 4B or 2P+1D+1B. Repeatable.", rich_help_panel=SEARCH),
]
SampleOption = Annotated[
    int,
    typer.Option(help="Requests to search with: the busiest part of a trace; 0: all.", min=0, rich_help_panel=SEARCH),
]
SeedOption = Annotated[int, typer.Option(help="Of all that is random.", rich_help_panel=SEARCH)]
JobsOption = Annotated[
    int,
    typer.Option(
        help="Simulations at a time.", min=0, show_default="the cores of this machine", rich_help_panel=SEARCH
    ),
]
PictureOption = Annotated[Path | None, typer.Option(help="Draw the plan: .png, .svg or .pdf.", rich_help_panel=RESULT)]
CountOption = Annotated[
    int, typer.Option(min=1, help="Number of decisions to show, newest first.", rich_help_panel=DECISIONS)
]


@app.command(epilog=EPILOG, rich_help_panel=views.OBSERVE)
def plan(  # noqa: PLR0913, PLR0917  # one parameter per option is how the command line is declared
    trace: TraceOption = None,
    rate: RateOption = "",
    prompt: PromptOption = 2000,
    output: OutputOption = 300,
    ttft: TtftOption = 5.0,
    itl: ItlOption = 0.1,
    share: ShareOption = "95%",
    gpus: GpusOption = 0,
    profile: ProfileOption = ProfileName.SMALL,
    speeds: SpeedsOption = "",
    gpus_per_worker: GpusPerWorkerOption = 0,
    model: ModelOption = "",
    layout: LayoutOption = None,
    export_speeds: ExportSpeedsOption = None,
    split: SplitOption = None,
    sample: SampleOption = SAMPLE,
    seed: SeedOption = 0,
    jobs: JobsOption = 0,
    picture: PictureOption = None,
    json: Json = False,
    count: CountOption = 20,
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
) -> None:
    """Size a fleet for a workload (--trace, --rate), or show what the running planner changed and why.

    Finds the split of prefill, decode and both workers that carries the most load

    within the targets, its headroom, what limits it, and the smallest fleet.
    """
    if export_speeds is not None:
        write_speeds(export_speeds, running_speeds(nats_url, state_dir, model))
        return
    if trace is None and not rate:
        if gpus or speeds or split or picture is not None:
            fail("Name the workload: --trace FILE, or --rate 5/s with --prompt and --output. See: baton plan --help")
        views.plan(count, nats_url, state_dir, json)
        return
    check_picture(picture)
    chosen = splits_of(split or [])
    workload = workload_of(trace, rate, (prompt, output), sample, seed)
    measured = speeds_of(speeds, nats_url, state_dir, model) if speeds else None
    if measured is None and gpus_per_worker not in {0, GPUS[profile]}:
        fail(
            f"The profile {profile.value} is of a worker with {_gpus(GPUS[profile])}. For other workers give measured "
            "speeds: --speeds FILE or --speeds running."
        )
    from replay.capacity.plan import Inputs

    by_role, layouts = layouts_of(layout or [], profile, measured)
    inputs = Inputs(
        workload=workload,
        profile=engine_of(profile, measured),
        engine=(measured.model or Path(speeds).name) if measured is not None else profile.value,
        measured=measured is not None,
        gpus_per_worker=gpus_per_worker or (measured.gpus if measured is not None else GPUS[profile]),
        target=target_of(ttft, itl, share),
        sample=sample,
        by_role=by_role,
        layouts=layouts,
    )
    carry_out(inputs, size_of(gpus, inputs, chosen), chosen, jobs, picture, json=json)


def carry_out(inputs: Inputs, size: int, chosen: list[Split], jobs: int, picture: Path | None, *, json: bool) -> None:
    """Search, and show the result."""
    from replay.capacity.plan import Impossible, case_of, make_plan
    from replay.capacity.report import draw
    from replay.capacity.trial import cores, runner

    try:
        case, notes = case_of(inputs)
        with runner(case, jobs or cores()) as run, progress(run) as phase:
            found = make_plan(inputs, notes, run, size, chosen, phase)
    except Impossible as error:
        fail(str(error))
    if json:
        print_json(found)
    else:
        draw(found, wide_console())
    if picture is not None:
        from replay.capacity.report import save

        try:
            save(found, picture)
        except OSError as error:
            fail(f"The picture cannot be written: {error}")
        Console(stderr=True, highlight=False).print(f"Picture: {picture}", markup=False, soft_wrap=True)


@contextmanager
def progress(run: Runner) -> Iterator[Callable[[str, int], None]]:
    """A line on the terminal: the phase, and about how long it takes. Yields what to call when a phase begins."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[left]}"),
    )
    screen = Console(stderr=True)
    shown = Progress(*columns, TimeElapsedColumn(), console=screen, transient=True, disable=not screen.is_terminal)
    with shown as bar:
        task = bar.add_task("", total=None, left="")
        clock = _Clock()

        def phase(what: str, count: int) -> None:
            clock.begin(count)
            bar.update(task, description=what, total=count or None, completed=0, left=clock.left())

        def done(_trial: object) -> None:
            clock.finished()
            bar.update(task, completed=clock.done, total=max(clock.done, clock.count) or None, left=clock.left())

        run.done = done
        yield phase


class _Clock:
    """Estimates how long the simulations of a phase take, from those so far."""

    def __init__(self) -> None:
        self.count = self.done = 0
        self._began_s = time.monotonic()
        self._all = 0

    def begin(self, count: int) -> None:
        """A phase of about so many simulations begins."""
        self.count, self.done = count, 0

    def finished(self) -> None:
        """A simulation has ended."""
        self.done += 1
        self._all += 1

    def left(self) -> str:
        """For the terminal."""
        text = f"{self._all} simulation{'' if self._all == 1 else 's'}"
        missing = self.count - self.done
        if not self._all or missing <= 0:
            return text
        each_s = (time.monotonic() - self._began_s) / self._all
        left_s = math.ceil(each_s * missing)
        left = f"{left_s} s" if left_s < 100 else f"{left_s / 60:.0f} min"
        return f"{text}, about {left} for this step"


def workload_of(trace: Path | None, rate: str, means: tuple[int, int], sample: int, seed: int) -> Workload:
    """Exits with the reason where there is none."""
    from replay.capacity.workload import generated, rate_of, read_workload
    from replay.traces import TraceError

    if trace is not None and rate:
        fail("Give either --trace or --rate.")
    if trace is None:
        try:
            return generated(rate_of(rate), *means, count=sample or SAMPLE, seed=seed)
        except ValueError as error:
            fail(f"--rate: {error}.")
    try:
        return read_workload(trace, seed)
    except TraceError as error:
        fail(f"This trace cannot be read: {error}")
    except OSError as error:
        fail(f"This trace cannot be read: {trace}: {error.strerror}")


def target_of(ttft: float, itl: float, share: str) -> Target:
    """Exits with the reason for targets that make no sense."""
    from replay.capacity.trial import Target

    for name, seconds in (("--ttft", ttft), ("--itl", itl)):
        if not 0.0 < seconds < float("inf"):
            fail(f"{name} must be more than 0 seconds.")
    try:
        parsed = float(share.strip().removesuffix("%")) / (100 if share.strip().endswith("%") else 1)
    except ValueError:
        parsed = 0.0
    if not 0.0 < parsed <= 1.0:
        fail(f"--share: {share!r} is no share of the requests; write 95% or 0.95.")
    return Target(ttft_s=ttft, itl_s=itl, share=parsed)


def splits_of(texts: list[str]) -> list[Split]:
    """Exits with the reason for what is no split."""
    from replay.split import SplitError, split_of

    try:
        chosen = [split_of(text) for text in texts]
    except SplitError as error:
        fail(f"--split: {error}.")
    return chosen


def size_of(gpus: int, inputs: Inputs, chosen: list[Split]) -> int:
    """Size of the fleet in ``inputs.unit``, for which the GPUs are enough; 0: to be found."""
    cost, unit = inputs.cost, inputs.unit
    sizes = {one.times(cost) for one in chosen}
    if len(sizes) > 1 and not inputs.layouts:
        fail("All splits to compare must have as many workers.")
    least = unit * min(cost.both, cost.prefill + cost.decode)
    if 0 < gpus < least:
        fail(f"A worker needs {_gpus(least)}; --gpus says {gpus}.")
    if not chosen:
        return gpus // unit
    size = max(sizes)
    if gpus and inputs.layouts and size > gpus // unit:
        fail(f"A split needs {_gpus(size * unit)}; --gpus says {gpus}.")
    if gpus and not inputs.layouts and size != gpus // unit:
        fail(f"{_gpus(gpus)} are {gpus // unit} workers, and the splits have {size}.")
    return size


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def check_picture(picture: Path | None) -> None:
    """Exit before the search if the picture cannot be drawn after it."""
    if picture is None:
        return
    from replay.capacity.report import FORMATS

    if picture.suffix not in FORMATS:
        fail(f"--picture: {picture} must end in {', '.join(FORMATS)}.")
    if not picture.parent.is_dir():
        fail(f"--picture: there is no folder {picture.parent}.")


def engine_of(profile: ProfileName, measured: EngineSpeeds | None) -> Profile:
    """The profile, or the measured speeds in its place."""
    from replay.capacity.speeds import SpeedsError, profile_of
    from replay.profile import PROFILES

    base = PROFILES[profile.value]
    try:
        return profile_of(measured, base) if measured is not None else base
    except SpeedsError as error:
        fail(str(error))


def layouts_of(
    texts: list[str], profile: ProfileName, measured: EngineSpeeds | None
) -> tuple[dict[Role, Profile], dict[Role, Layout]]:
    """The engine and the layout of each role; exits with the reason where there is none."""
    from replay.capacity.layouts import SHAPES, Layout, LayoutError, laid_out, layouts_of
    from replay.profile import PROFILES
    from shared.contracts.workers import Role

    if not texts:
        return {}, {}
    if measured is not None:
        fail("--layout: measured speeds are of the layout that they were measured with. Leave out one of the two.")
    shape = SHAPES[profile.value]
    try:
        found = layouts_of(texts, Layout(tensor=shape.gpus))
        layouts = {Role(role): one for role, one in found.items()}
        return {role: laid_out(PROFILES[profile.value], shape, one) for role, one in layouts.items()}, layouts
    except LayoutError as error:
        fail(f"--layout: {error}.")


def speeds_of(source: str, nats_url: str, state_dir: Path | None, model: str) -> EngineSpeeds:
    """Read a file's speeds, or those of the running system."""
    from replay.capacity.speeds import SpeedsError, read_speeds

    if source == RUNNING:
        return running_speeds(nats_url, state_dir, model)
    try:
        return read_speeds(Path(source))
    except SpeedsError as error:
        fail(str(error))


def running_speeds(nats_url: str, state_dir: Path | None, model: str) -> EngineSpeeds:
    """What the workers of the running system have learned of their engines."""
    from replay.capacity.speeds import SpeedsError, speeds_of
    from services.launcher.bus_client import read_fleet, read_loads

    url = find_nats(nats_url, state_dir)
    fleet = reply_of(read_fleet(url), url, state_dir)
    loads = reply_of(read_loads(url, fleet), url, state_dir)
    try:
        return speeds_of([worker.record for worker in fleet.state.workers], loads, model)
    except SpeedsError as error:
        fail(str(error))


def write_speeds(path: Path, speeds: EngineSpeeds) -> None:
    """As JSON, to read and to change."""
    import msgspec

    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(speeds)) + b"\n")
    except OSError as error:
        fail(f"The speeds cannot be written: {error}")
    Console(highlight=False).print(Text(f"The speeds of {speeds.model} are in {path}."), soft_wrap=True)
