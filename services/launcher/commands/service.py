"""``baton service``: files with which systemd, Podman or Slurm run a fleet; an upgrade of workers one after another."""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from services.launcher.commands.options import StateDir, fail, state_folder
from services.launcher.system.process_plan import PlanRefused
from shared.bus.nats_credentials import Access
from shared.bus.port import BusError
from shared.contracts.channels import Party

if TYPE_CHECKING:
    from services.launcher.service_files.host_services import File, HostServices
    from services.launcher.service_files.quadlet import Containers
    from services.launcher.service_files.upgrade import RunningWorkers, Systemctl
    from services.launcher.system.options import UpOptions
    from services.launcher.system.process_plan import Machine, ProcessPlan

VARIABLES = "services"
"""In the state directory: the variables of each process."""
SYSTEM_UNITS, USER_UNITS = "/etc/systemd/system", "~/.config/systemd/user"
SYSTEM_QUADLETS, USER_QUADLETS = "/etc/containers/systemd", "~/.config/containers/systemd"
CDI_FOLDERS = ("/etc/cdi", "/var/run/cdi")
PODMAN_MIN = (4, 5)
PODMAN_S_MAX = 30.0
CONNECT_S_MAX = 10.0
TO_FIND_PROGRAMS = ("PATH", "LD_LIBRARY_PATH", "XDG_CACHE_HOME")
"""Compilers and libraries that engines call, and models that were downloaded before."""
Config = Annotated[
    Path | None, typer.Option(help="A fleet file; on a host that has joined, its token suffices.", metavar="FLEET.TOML")
]
Name = Annotated[str, typer.Option(help="The host in the fleet file.", show_default="this machine's name")]
User = Annotated[bool, typer.Option("--user", help="Units of this user's own service manager.")]


class Kind(StrEnum):
    """Who runs the processes."""

    SYSTEMD = "systemd"
    QUADLET = "quadlet"
    SLURM = "slurm"


EPILOG = """[bold]Examples[/]

[cyan]baton service install --config fleet.toml --user[/]   on the head host, without being root

[cyan]baton service install --user[/]   on a host that has joined with a token

[cyan]baton service install --config fleet.toml --out units[/]   to look at them, and to copy them as root

[cyan]baton service install --kind quadlet --image localhost/baton-engine-cuda:dev[/]   in containers, with the token

[cyan]baton service install --kind slurm --config fleet.toml --sbatch partition=gpu --sbatch time=7-0[/]   one job

Then, without --user as root: [cyan]systemctl --user daemon-reload; systemctl --user enable --now baton.target[/],
or with Slurm [cyan]sbatch baton.sbatch[/]"""

service = typer.Typer(no_args_is_help=True, help="Run a host's processes with systemd or Podman, a fleet with Slurm.")


def add_to(app: typer.Typer) -> None:
    """Add the group of commands."""
    app.add_typer(service, name="service", rich_help_panel="Run a system")


@dataclass(frozen=True, kw_only=True)
class Installation:
    """Files to write, and what to do then."""

    files: Sequence[File]
    variables: Sequence[File] = ()
    folders: Sequence[str] = ()
    then: Sequence[str]


@service.command(epilog=EPILOG)
def install(  # noqa: PLR0913, PLR0917  # one parameter per option is how the command line is declared
    config: Config = None,
    name: Name = "",
    kind: Annotated[Kind, typer.Option(help="systemd units, Podman quadlets, or an sbatch file.")] = Kind.SYSTEMD,
    user: User = False,
    image: Annotated[str, typer.Option(help="Of all containers (quadlet).", metavar="IMAGE")] = "",
    sbatch: Annotated[
        list[str] | None, typer.Option(help="An option of sbatch (slurm); may be repeated.", metavar="OPTION[=VALUE]")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the files into this folder.", metavar="DIR")] = None,
    only_print: Annotated[bool, typer.Option("--print", help="Print files and variables, and write none.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Write what runs this host as services, or the fleet as a Slurm job. Repeat after changes."""
    folder = state_folder(state_dir)
    check_options(kind, name=name, user=user, image=image, sbatch=sbatch)
    if not (out or only_print):
        check_program(kind)
    made = (
        slurm_job(config, folder, sbatch or ())
        if kind is Kind.SLURM
        else services_of(config, name, folder, image, user)
    )
    if only_print:
        for each in (*made.files, *made.variables):
            print(f"# {each.name}\n{each.text}")
        return
    try:
        places = {write_file(out or place_of(each, user=user), each) for each in made.files}
        if kind is not Kind.SLURM:
            write_variables(folder / VARIABLES, made.variables)
        for needed in made.folders:
            Path(needed).mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}. Write the files elsewhere with --out, or use --user.")
    systemds = {str(place_of(each, user=user)) for each in made.files} if out and kind is not Kind.SLURM else set()
    then = f"Copy them to {' and '.join(sorted(systemds))}, then" if systemds else "To start"
    print(f"Written: {', '.join(sorted(map(str, places)))}. {then}:")
    for line in made.then:
        print(f"  {line}")


def check_options(kind: Kind, *, name: str, user: bool, image: str, sbatch: list[str] | None) -> None:
    """Exits if an option has no effect, or one is missing."""
    if image and kind is not Kind.QUADLET:
        fail("--image is for containers: add --kind quadlet.")
    if sbatch and kind is not Kind.SLURM:
        fail("--sbatch is for an sbatch file: add --kind slurm.")
    if kind is Kind.QUADLET and not image:
        fail(
            "--kind quadlet needs --image. compose/engine.Dockerfile and light.Dockerfile (simulated engines) make one."
        )
    if kind is Kind.SLURM and (name or user):
        fail(f"{'--name' if name else '--user'} has no effect with --kind slurm: one job runs all hosts of the file.")


def check_program(kind: Kind) -> None:
    """Exits if what shall run the files is not here."""
    if kind is Kind.SLURM and not shutil.which("sbatch"):
        fail(
            "Slurm is not here: sbatch was not found. Run this where jobs are submitted, or write the file with --out."
        )
    if kind is Kind.QUADLET and podman_version() < PODMAN_MIN:
        fail("Podman 4.5 or newer is not here. Install it, or write the files for another host with --out.")


def podman_version() -> tuple[int, ...]:
    """Empty if there is no Podman."""
    try:
        done = subprocess.run(
            ["podman", "--version"], capture_output=True, text=True, timeout=PODMAN_S_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(map(int, re.findall(r"\d+", done.stdout)[:2]))


def services_of(config: Path | None, name: str, state_dir: Path, image: str, user: bool) -> Installation:
    """Units, or quadlets if there is an image; exits with the reason if the host cannot run."""
    from services.launcher.service_files import quadlet, systemd
    from services.launcher.service_files.host_services import CannotWriteService, HostServices

    try:
        processes = processes_of(config, name, state_dir, in_containers=bool(image))
        owner = "" if user else owner_of(state_dir)
        host = HostServices(
            processes=processes, inherited=inherited(image), folder=str(state_dir / VARIABLES), user=owner
        )
        if not image:
            then = then_start(user=user)
            return Installation(files=systemd.unit_files(host), variables=systemd.variable_files(host), then=then)
        containers = containers_of(state_dir, image)
        return Installation(
            files=quadlet.quadlet_files(host, containers),
            variables=quadlet.plain_variable_files(host),
            folders=quadlet.folders(host, containers),
            then=[*about_gpus(host), *then_start(user=user)],
        )
    except (PlanRefused, CannotWriteService) as refused:
        fail(str(refused))


def then_start(*, user: bool) -> list[str]:
    """Commands that start units."""
    systemctl = "systemctl --user" if user else "systemctl"
    linger = ["loginctl enable-linger    # they keep running when you log out"] if user else []
    return [f"{systemctl} daemon-reload && {systemctl} enable --now baton.target", *linger]


def containers_of(state_dir: Path, image: str) -> Containers:
    """Exits if the cache of models is somewhere that containers would not find."""
    from services.launcher.service_files.quadlet import Containers

    if os.environ.get("HF_HUB_CACHE"):
        fail("HF_HUB_CACHE is set: for containers, name the cache of models with HF_HOME.")
    models = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser().absolute()
    return Containers(image=image, state_dir=str(state_dir), models=str(models), uid=os.geteuid(), gid=os.getegid())


def about_gpus(host: HostServices) -> list[str]:
    """What makes GPUs known to containers, unless it was done."""
    used = any("CUDA_VISIBLE_DEVICES" in each.env for each in host.workers)
    if not used or any([*Path(each).glob("nvidia*")] for each in CDI_FOLDERS):
        return []
    return ["nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml    # as root, once: containers see the GPUs"]


def slurm_job(config: Path | None, state_dir: Path, options: Sequence[str]) -> Installation:
    """An sbatch file; exits with the reason if there can be none."""
    from services.launcher.commands.fleet import fleet_of, head_of
    from services.launcher.fleet.fleet_file import WrongFleetFile, part_of
    from services.launcher.service_files.host_services import CannotWriteService
    from services.launcher.service_files.slurm import NAME, SlurmJob, sbatch_file

    if not config:
        fail("--kind slurm needs the fleet file: --config.")
    found = fleet_of(config, head_address="127.0.0.1")  # The job knows the right one.
    job = SlurmJob(
        command=(sys.executable, "-m", "services.launcher"),
        fleet_file=str(config.expanduser().absolute()),
        state_dir=str(state_dir),
        inherited=inherited(),
        options=options,
    )
    try:
        file = sbatch_file(found, job)
    except (WrongFleetFile, CannotWriteService) as error:
        fail(f"{config}: {error}" if isinstance(error, WrongFleetFile) else str(error))
    head_of(found, part_of(found, found.head.name), state_dir, sys.stderr)  # A job's output is no place for an API key.
    return Installation(files=[file], then=[f"sbatch {NAME}"])


@service.command()
def upgrade(user: User = False, state_dir: StateDir = None) -> None:
    """Restart the workers of this host one after another: each drains, and must be ready before the next one.

    Of units, or if there are none, of the `baton up` or `baton join` that runs with the state directory.
    """
    from services.launcher.service_files.upgrade import RunningWorkers, Systemctl, UpgradeStopped

    folder = state_folder(state_dir)
    running = RunningWorkers(str(folder))
    try:
        if workers := workers_in(folder / VARIABLES):
            asyncio.run(_upgrade(workers, Systemctl(user=user)))
        elif workers := running.variables():
            asyncio.run(_upgrade(workers, running))
        else:
            fail(f"There are no workers of {folder} here: neither units of `baton service install`, nor running ones.")
    except UpgradeStopped as stopped:
        fail(f"{stopped}. Workers that come after it were not restarted.")
    except BusError as error:
        fail(f"The workers' NATS: {error}")


def workers_in(folder: Path) -> Sequence[Mapping[str, str]]:
    """The variables of the workers that have units on this host."""
    from services.launcher.service_files.host_services import read_variables

    found = [read_variables(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.env"))]
    return [each for each in found if "WORKER_WORKER_ID" in each]


async def _upgrade(workers: Sequence[Mapping[str, str]], manager: Systemctl | RunningWorkers) -> None:
    from services.launcher.service_files.upgrade import restart_workers
    from shared.bus.nats_bus import connect_nats

    key = Access(
        party=Party.WORKER,
        nkey_file=workers[0].get("BATON_NATS_NKEY_FILE", ""),
        ca_file=workers[0].get("BATON_NATS_CA_FILE", ""),
    )
    url = workers[0]["BATON_NATS_URL"]
    bus = await connect_nats(url, name="baton-upgrade", connect_s_max=CONNECT_S_MAX, access=key)
    try:
        await restart_workers(bus, [each["WORKER_WORKER_ID"] for each in workers], manager.restart, print)
    finally:
        await bus.close()


def owner_of(state_dir: Path) -> str:
    """The user that the processes run as: the one who types, to whom the files must belong; exits if they do not."""
    owner = pwd.getpwuid(state_dir.stat().st_uid).pw_name
    if state_dir.stat().st_uid != os.geteuid():
        fail(f"{state_dir} belongs to {owner}: write the units as {owner} with --out, and copy them.")
    return owner


def processes_of(
    config: Path | None, name: str, state_dir: Path, *, in_containers: bool = False
) -> Sequence[ProcessPlan]:
    """What this host runs. Raises PlanRefused."""
    from services.launcher.system import machine
    from services.launcher.system.launch import narrowed, with_model_folder
    from services.launcher.system.plan import plan_system

    options = host_options(config, name, state_dir)
    models = tuple(map(with_model_folder, options.models))
    above = max(options.port, options.collector_port, options.nats_port)
    ports = machine.free_ports(options.host, above, options.routers) if options.routers > 1 else ()
    options = msgspec.structs.replace(options, models=models, router_ports=ports)
    here = machine_with_containers() if in_containers else machine.describe_machine()
    return plan_system(options, narrowed(here, options)).processes


def machine_with_containers() -> Machine:
    """Facts for the programs of an image. GPUs count here without vLLM."""
    from services.launcher.system import machine
    from services.launcher.system.process_plan import Machine

    return Machine(python="python", nats_server="nats-server", cores=machine.physical_cores(), **machine.gpu_facts())


def host_options(config: Path | None, name: str, state_dir: Path) -> UpOptions:
    """Of the host in the fleet file, or of the one that has joined."""
    from services.launcher.commands import fleet, tokens

    if not config:
        token = tokens.stored(state_dir, name or tokens.only_host(state_dir))
        return tokens.options_of(state_dir, token, token.part)
    found = fleet.fleet_of(config)
    part = fleet.part_named(config, found, name)
    if part.name == found.head.name:
        return fleet.head_of(found, part, state_dir, sys.stderr)
    return tokens.options_of(state_dir, fleet.token_of(config, found, part, state_dir), part)


def inherited(image: str = "") -> dict[str, str]:
    """The variables of this environment that processes of Baton read, also in containers of this image."""
    from services.launcher.fleet.fleet_file import FOR_SERVICES, FOR_WORKERS
    from services.launcher.system.machine import inherited_environment

    names = (*FOR_SERVICES, *FOR_WORKERS, *(() if image else TO_FIND_PROGRAMS))
    return {key: value for key, value in inherited_environment().items() if key.startswith(names)}


def place_of(file: File, *, user: bool) -> Path:
    """The folder in which its reader looks for it."""
    if file.name.endswith(".sbatch"):
        return Path.cwd()
    if file.name.endswith(".container"):
        return Path(USER_QUADLETS if user else SYSTEM_QUADLETS).expanduser()
    return Path(USER_UNITS if user else SYSTEM_UNITS).expanduser()


def write_file(folder: Path, file: File) -> Path:
    """Replace it, or the one of its name; returns the folder. Raises OSError."""
    from services.launcher.cluster.files import write_private

    folder.mkdir(parents=True, exist_ok=True)
    if file.is_secret:
        write_private(folder / file.name, file.text.encode())
    else:
        (folder / file.name).write_text(file.text, encoding="utf-8")
    return folder


def write_variables(folder: Path, files: Sequence[File]) -> None:
    """Also delete the variables of processes that this host no longer runs. Raises OSError."""
    kept = {each.name for each in files}
    for file in folder.glob("*.env"):
        if file.name not in kept:
            file.unlink()
    for each in files:
        write_file(folder, each)
