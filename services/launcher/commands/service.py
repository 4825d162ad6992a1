"""``baton service``: files with which systemd, Podman, Docker or Slurm run a fleet; a restart of processes in turn."""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.launcher.commands.options import StateDir, fail, state_folder
from shared.bus.port import BusError
from shared.contracts.channels import Party

if TYPE_CHECKING:
    from services.launcher.fleet.fleet_file import Fleet, HostPart
    from services.launcher.service_files.files import HostService
    from services.launcher.system.rolling_restart import RunningProcess

COMPOSE_FILE = "baton.compose.yaml"
VARIABLES_FILE = "service.env"
"""File in the state directory, for its owner only: it may have variables such as HF_TOKEN."""
SYSTEM_UNITS, USER_UNITS = "/etc/systemd/system", "~/.config/systemd/user"
SYSTEM_QUADLETS, USER_QUADLETS = "/etc/containers/systemd", "~/.config/containers/systemd"
CDI_FOLDERS = ("/etc/cdi", "/var/run/cdi")
PODMAN_MIN = (4, 5)
PODMAN_S_MAX = 30.0
CONNECT_S_MAX = 10.0
TO_FIND_PROGRAMS = ("PATH", "LD_LIBRARY_PATH", "XDG_CACHE_HOME")
"""Variables that lead to compilers, libraries and models that were downloaded before."""
Config = Annotated[
    Path | None, typer.Option(help="A fleet file; on a host that has joined, its token suffices.", metavar="FLEET.TOML")
]
Name = Annotated[str, typer.Option(help="The host in the fleet file.", show_default="this machine's name")]
User = Annotated[bool, typer.Option("--user", help="A unit of this user's own service manager.")]


class Kind(StrEnum):
    """The program that runs a host or a fleet."""

    SYSTEMD = "systemd"
    QUADLET = "quadlet"
    COMPOSE = "compose"
    SLURM = "slurm"


CONTAINERS = {Kind.QUADLET, Kind.COMPOSE}

EPILOG = """[bold]Examples[/]

[cyan]baton service install --config fleet.toml --user[/]   on the head host, without being root

[cyan]baton service install --user[/]   on a host that has joined with a token

[cyan]baton service install --config fleet.toml --out units[/]   to look at it, and to copy it as root

[cyan]baton service install --kind quadlet --image localhost/baton-engine-cuda:dev[/]   in a container, with the token

[cyan]baton service install --kind compose --image baton-engine-cuda:dev --config fleet.toml[/]   the same with Docker

[cyan]baton service install --kind slurm --config fleet.toml[/]   one job for all hosts

Then, without --user as root: [cyan]systemctl --user daemon-reload; systemctl --user enable --now baton[/],
or with Slurm [cyan]sbatch --partition=gpu --time=7-0 baton.sbatch[/]"""
UPGRADE_EPILOG = """[bold]Examples[/]

[cyan]baton service upgrade[/]   all workers of this host, one after another

[cyan]baton service upgrade gpu-1-decode-1 router[/]   these processes"""

service = typer.Typer(no_args_is_help=True, help="Run a host with systemd, Podman or Docker, a fleet with Slurm.")


def add_to(app: typer.Typer) -> None:
    app.add_typer(service, name="service", rich_help_panel="Run a system")


@dataclass(frozen=True, kw_only=True)
class Installation:
    """A file to write, and what to do then."""

    name: str
    text: str
    folder: str
    """The folder in which the program that runs it looks for the file."""
    variables: str = ""
    has_variables: bool = False
    """Whether the file itself has the variables, so that only its owner may read it."""
    folders: Sequence[str] = ()
    """Folders that must exist, because a container writes there."""
    head: tuple[Fleet, HostPart] | None = None
    """The head host that it runs: its keys, and a first API key, must exist."""
    then: Sequence[str]


@service.command(epilog=EPILOG)
def install(  # noqa: PLR0913, PLR0917  # one parameter per option is how the command line is declared
    config: Config = None,
    name: Name = "",
    kind: Annotated[
        Kind, typer.Option(help="A systemd unit, a Podman quadlet, a compose file, or an sbatch file.")
    ] = Kind.SYSTEMD,
    user: User = False,
    image: Annotated[str, typer.Option(help="Image of the container (quadlet, compose).", metavar="IMAGE")] = "",
    out: Annotated[Path | None, typer.Option(help="Write the file into this folder.", metavar="DIR")] = None,
    only_print: Annotated[bool, typer.Option("--print", help="Print file and variables, and write none.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Write what runs this host as a service, or the fleet as a Slurm job. Repeat after changes."""
    from services.launcher.cluster.files import write_private
    from services.launcher.service_files.files import CannotWriteService

    folder = state_folder(state_dir)
    check_options(kind, name=name, user=user, image=image)
    if not (out or only_print):
        check_program(kind)
    try:
        made = slurm_job(config, folder) if kind is Kind.SLURM else service_of(kind, config, name, folder, image, user)
    except CannotWriteService as refused:
        fail(str(refused))
    if only_print:
        print(f"# {made.name}\n{made.text}" + (f"# {VARIABLES_FILE}\n{made.variables}" if made.variables else ""))
        return
    if made.head:
        from services.launcher.commands.fleet import head_of

        head_of(*made.head, folder, sys.stderr)  # A service's log and a job's output are no place for an API key.
    place = out or Path(made.folder).expanduser()
    try:
        place.mkdir(parents=True, exist_ok=True)
        if made.has_variables:
            write_private(place / made.name, made.text.encode())
        else:
            (place / made.name).write_text(made.text, encoding="utf-8")
        if made.variables:
            write_private(folder / VARIABLES_FILE, made.variables.encode())
        for needed in made.folders:
            Path(needed).mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}. Write the file elsewhere with --out, or use --user.")
    is_elsewhere = out and made.folder != "."
    print(f"Written: {place / made.name}. {f'Copy it to {made.folder}, then' if is_elsewhere else 'To start'}:")
    for line in made.then:
        print(f"  {line}")


def check_options(kind: Kind, *, name: str, user: bool, image: str) -> None:
    """Exits if an option has no effect, or one is missing."""
    if image and kind not in CONTAINERS:
        fail("--image is for containers: add --kind quadlet or --kind compose.")
    if kind in CONTAINERS and not image:
        fail(
            f"--kind {kind} needs --image. compose/engine.Dockerfile and light.Dockerfile (simulated engines) make one."
        )
    if kind is Kind.COMPOSE and user:
        fail("--user has no effect with --kind compose: the processes run as the owner of the state directory.")
    if kind is Kind.SLURM and (name or user):
        fail(f"{'--name' if name else '--user'} has no effect with --kind slurm: one job runs all hosts of the file.")


def check_program(kind: Kind) -> None:
    """Exits if what shall run the file is not here."""
    if kind is Kind.SLURM and not shutil.which("sbatch"):
        fail(
            "Slurm is not here: sbatch was not found. Run this where jobs are submitted, or write the file with --out."
        )
    if kind is Kind.COMPOSE and not shutil.which("docker"):
        fail("Docker is not here. Install it, or write the file for another host with --out.")
    if kind is Kind.QUADLET and podman_version() < PODMAN_MIN:
        fail("Podman 4.5 or newer is not here. Install it, or write the file for another host with --out.")


def podman_version() -> tuple[int, ...]:
    """Empty if there is no Podman."""
    try:
        done = subprocess.run(
            ["podman", "--version"], capture_output=True, text=True, timeout=PODMAN_S_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(map(int, re.findall(r"\d+", done.stdout)[:2]))


def service_of(kind: Kind, config: Path | None, name: str, state_dir: Path, image: str, user: bool) -> Installation:
    """What runs one host; exits with the reason if it cannot."""
    from services.launcher.service_files import files
    from services.launcher.system.process_plan import STOP_SPARE_S

    variables = inherited(image)  # Before the fleet file's are set here: the host reads them again at each start.
    part, runs, head_of_fleet = host_part(config, name, state_dir)
    baton = ("baton",) if image else (sys.executable, "-m", "services.launcher")
    at = ("--state-dir", str(state_dir))
    host = files.HostService(
        command=(*baton, *runs, "--keep-trying", *at),
        upgrade=(*baton, "service", "upgrade", *at),
        variables=variables,
        variables_file=str(state_dir / VARIABLES_FILE),
        stop_s=files.host_stop_s(part, variables, is_head=head_of_fleet is not None) + STOP_SPARE_S,
        of_system=not user,
    )
    systemctl = "systemctl --user" if user else "systemctl"
    then = [f"{systemctl} daemon-reload && {systemctl} enable --now baton"]
    then += ["loginctl enable-linger    # it keeps running when you log out"] if user else []
    head = (head_of_fleet, part) if head_of_fleet else None
    if image:
        then = then if kind is Kind.QUADLET else [f"docker compose -f {COMPOSE_FILE} up -d"]
        return replace(container_of(kind, config, part, host, state_dir, image, then), head=head)
    return Installation(
        name="baton.service",
        text=files.systemd_unit(host, owner_of(state_dir)),
        folder=USER_UNITS if user else SYSTEM_UNITS,
        variables=files.quoted_variables(variables),
        head=head,
        then=then,
    )


def container_of(
    kind: Kind, config: Path | None, part: HostPart, host: HostService, state_dir: Path, image: str, then: list[str]
) -> Installation:
    """A container; exits if the cache of models is somewhere that it would not find."""
    from services.launcher.service_files import files
    from services.launcher.system import machine

    if os.environ.get("HF_HUB_CACHE"):
        fail("HF_HUB_CACHE is set: for a container, name the cache of models with HF_HOME.")
    models = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser().absolute()
    key_files = {f"{number}_FILE": each.attach_key_file for number, each in enumerate(part.models)}
    reads = files.folders_read({**part.env, **host.variables, **key_files})
    reads += [each.model for each in part.models if each.model.startswith("/")]
    owner_of(state_dir)
    container = files.Container(
        image=image,
        state_dir=str(state_dir),
        models=str(models),
        reads=[*([str(config.expanduser().absolute())] if config else []), *reads],
        uid=os.geteuid(),
        gid=os.getegid(),
        has_gpus=part.engine == "vllm" and not part.cores and bool(part.gpus or machine.gpus()),
    )
    folders = [f"{state_dir}/cache", str(models)]
    if kind is Kind.COMPOSE:
        text = files.compose_file(host, container)
        return Installation(name=COMPOSE_FILE, text=text, has_variables=True, folder=".", folders=folders, then=then)
    if container.has_gpus and not any([*Path(each).glob("nvidia*")] for each in CDI_FOLDERS):
        cdi = "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml    # as root, once: containers see the GPUs"
        then = [cdi, *then]
    return Installation(
        name="baton.container",
        text=files.quadlet(host, container),
        folder=SYSTEM_QUADLETS if host.of_system else USER_QUADLETS,
        variables=files.plain_variables(files.container_variables(host, container)),
        folders=folders,
        then=then,
    )


def host_part(config: Path | None, name: str, state_dir: Path) -> tuple[HostPart, tuple[str, ...], Fleet | None]:
    """What the host runs, the arguments of `baton` that run it, and, of the head host, its fleet."""
    from services.launcher.commands import fleet, tokens
    from services.launcher.fleet.joining import TOKEN, joined_folder

    if not config:
        token = tokens.stored(state_dir, name or tokens.only_host(state_dir))
        return token.part, ("join", str(joined_folder(state_dir, token.part.name) / TOKEN)), None
    found = fleet.fleet_of(config)
    part = fleet.part_named(config, found, name or socket.gethostname())
    is_head = part.name == found.head.name
    if not is_head:
        fleet.token_of(config, found, part, state_dir)
    runs = ("up", "--config", str(config.expanduser().absolute()), "--name", part.name)
    return part, runs, found if is_head else None


def slurm_job(config: Path | None, state_dir: Path) -> Installation:
    """An sbatch file; exits with the reason if there can be none."""
    from services.launcher.commands.fleet import fleet_of
    from services.launcher.fleet.fleet_file import WrongFleetFile, part_of
    from services.launcher.service_files.slurm import SlurmJob, sbatch_file

    if not config:
        fail("--kind slurm needs the fleet file: --config.")
    found = fleet_of(config, head_address="127.0.0.1")  # The job knows the right one.
    job = SlurmJob(
        command=(sys.executable, "-m", "services.launcher"),
        fleet_file=str(config.expanduser().absolute()),
        state_dir=str(state_dir),
        inherited=inherited(),
    )
    try:
        text = sbatch_file(found, job)
    except WrongFleetFile as error:
        fail(f"{config}: {error}")
    return Installation(
        name="baton.sbatch",
        text=text,
        folder=".",
        head=(found, part_of(found, found.head.name)),
        then=["sbatch --partition=PARTITION --time=TIME baton.sbatch    # with your options"],
    )


def owner_of(state_dir: Path) -> str:
    """The user that the processes run as: the one who types; exits if the folder is there and belongs to another."""
    uid = state_dir.stat().st_uid if state_dir.exists() else os.geteuid()
    owner = pwd.getpwuid(uid).pw_name
    if uid != os.geteuid():
        fail(f"{state_dir} belongs to {owner}: write the unit as {owner} with --out, and copy it.")
    return owner


def inherited(image: str = "") -> dict[str, str]:
    """The variables of this environment that Baton reads, also in a container of this image."""
    from services.launcher.fleet.fleet_file import FOR_SERVICES, FOR_WORKERS, OWN
    from services.launcher.system.machine import API_KEY_VARIABLE, NATS_SERVER_VARIABLE

    names = (*FOR_SERVICES, *FOR_WORKERS, *(() if image else TO_FIND_PROGRAMS))
    left_out = {*OWN, API_KEY_VARIABLE, *((NATS_SERVER_VARIABLE,) if image else ())}
    return {key: value for key, value in os.environ.items() if key.startswith(names) and key not in left_out}


@service.command(epilog=UPGRADE_EPILOG)
def upgrade(
    names: Annotated[list[str] | None, typer.Argument(help="Processes.", show_default="all workers")] = None,
    state_dir: StateDir = None,
) -> None:
    """Restart processes of this host one after another: each drains, and must be ready before the next one.

    They are those of the `baton up` or `baton join` that runs with the state directory.
    """
    from services.launcher.system.rolling_restart import RestartStopped, running_processes

    folder = state_folder(state_dir)
    running = running_processes(str(folder))
    if unknown := sorted({*(names or ())} - {each.name for each in running}):
        fail(f"No {unknown[0]} runs with {folder}. Running: {', '.join(each.name for each in running) or 'nothing'}.")
    chosen = [each for each in running if each.name in names] if names else []
    chosen = chosen or [each for each in running if each.service is Party.WORKER]
    if not chosen:
        fail(f"No workers run with {folder}.")
    try:
        asyncio.run(_upgrade(chosen))
    except RestartStopped as stopped:
        fail(f"{stopped}. Processes that come after it were not restarted.")
    except BusError as error:
        fail(f"NATS: {error}")


async def _upgrade(processes: Sequence[RunningProcess]) -> None:
    from services.launcher.system.rolling_restart import restart_in_turn
    from shared.bus.nats_bus import connect_nats

    bus = await connect_nats(
        processes[0].nats_url, name="baton-upgrade", connect_s_max=CONNECT_S_MAX, access=processes[0].access
    )
    try:
        await restart_in_turn(bus, processes, print)
    finally:
        await bus.close()
