"""``baton service``: systemd units for the processes of one host, and an upgrade of its workers one after another."""

from __future__ import annotations

import asyncio
import os
import pwd
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from services.launcher.commands.options import StateDir, common_settings, fail
from services.launcher.system.process_plan import PlanRefused
from shared.bus.nats_credentials import Access
from shared.bus.port import BusError
from shared.contracts.channels import Party

if TYPE_CHECKING:
    from services.launcher.system.options import UpOptions
    from services.launcher.system.process_plan import ProcessPlan
    from services.launcher.systemd import File, Systemctl

VARIABLES = "services"
"""In the state directory: the variables of each process."""
SYSTEM_UNITS, USER_UNITS = "/etc/systemd/system", "~/.config/systemd/user"
CONNECT_S_MAX = 10.0
TO_FIND_PROGRAMS = ("PATH", "LD_LIBRARY_PATH", "XDG_CACHE_HOME")
"""Compilers and libraries that engines call, and models that were downloaded before."""
Config = Annotated[
    Path | None,
    typer.Option(help="A fleet file; on a host that has joined, its token suffices.", metavar="FLEET.TOML"),
]
Name = Annotated[str, typer.Option(help="The host in the fleet file.", show_default="this machine's name")]
User = Annotated[bool, typer.Option("--user", help="Units of this user's own service manager.")]
EPILOG = """[bold]Examples[/]

[cyan]baton service install --config fleet.toml --user[/]   on the head host, without being root

[cyan]baton service install --user[/]   on a host that has joined with a token

[cyan]baton service install --config fleet.toml --out units[/]   to look at them, and to copy them as root

Then, without --user as root: [cyan]systemctl --user daemon-reload; systemctl --user enable --now baton.target[/]"""

service = typer.Typer(no_args_is_help=True, help="Run a host's processes as systemd services.")


def add_to(app: typer.Typer) -> None:
    """Add the group of commands."""
    app.add_typer(service, name="service", rich_help_panel="Run a system")


@service.command(epilog=EPILOG)
def install(
    config: Config = None,
    name: Name = "",
    user: User = False,
    out: Annotated[Path | None, typer.Option(help="Write the units into this folder.", metavar="DIR")] = None,
    only_print: Annotated[bool, typer.Option("--print", help="Print units and variables, and write none.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Write systemd units for this host: a target, each process, and a template for workers. Repeat after changes."""
    folder = (state_dir or Path(common_settings().state_dir)).expanduser().absolute()
    units, variables = made(config, name, folder, user=user)
    if only_print:
        for each in (*units, *variables):
            print(f"# {each.name}\n{each.text}")
        return
    target = out or Path(USER_UNITS if user else SYSTEM_UNITS).expanduser()
    try:
        write(target, units)
        write(folder / VARIABLES, variables)
        remove_others(folder / VARIABLES, variables)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}. Write the units elsewhere with --out, or use --user.")
    systemctl = "systemctl --user" if user else "systemctl"
    print(f"Units: {target}. Variables: {folder / VARIABLES}. To start them:")
    print(f"  {systemctl} daemon-reload && {systemctl} enable --now baton.target")
    if user:
        print("  loginctl enable-linger    # they keep running when you log out")


@service.command()
def upgrade(user: User = False, state_dir: StateDir = None) -> None:
    """Restart the workers of this host one after another: each drains, and must be ready before the next one."""
    from services.launcher.systemd import Systemctl, UpgradeStopped

    folder = (state_dir or Path(common_settings().state_dir)).expanduser().absolute()
    try:
        asyncio.run(_upgrade(workers_in(folder / VARIABLES), Systemctl(user=user)))
    except UpgradeStopped as stopped:
        fail(f"{stopped}. Workers that come after it were not restarted.")
    except BusError as error:
        fail(str(error))


def workers_in(folder: Path) -> list[dict[str, str]]:
    """The variables of the workers of this host; exits if there are none."""
    from services.launcher.systemd import read_variables

    found = [read_variables(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.env"))]
    workers = [each for each in found if "WORKER_WORKER_ID" in each]
    if not workers:
        fail(f"There are no workers in {folder}: `baton service install` writes their files.")
    return workers


async def _upgrade(workers: Sequence[Mapping[str, str]], systemctl: Systemctl) -> None:
    from services.launcher.systemd import restart_workers
    from shared.bus.nats_bus import connect_nats

    key = Access(
        party=Party.WORKER,
        nkey_file=workers[0].get("BATON_NATS_NKEY_FILE", ""),
        ca_file=workers[0].get("BATON_NATS_CA_FILE", ""),
    )
    url = workers[0]["BATON_NATS_URL"]
    bus = await connect_nats(url, name="baton-upgrade", connect_s_max=CONNECT_S_MAX, access=key)
    try:
        await restart_workers(bus, [each["WORKER_WORKER_ID"] for each in workers], systemctl.restart, print)
    finally:
        await bus.close()


def made(config: Path | None, name: str, state_dir: Path, *, user: bool) -> tuple[list[File], list[File]]:
    """Units, and the files with their variables; exits with the reason if the host cannot run."""
    from services.launcher.systemd import CannotWriteUnit, UnitOptions, unit_files, variable_files

    try:
        processes = processes_of(config, name, state_dir)
        owner = "" if user else owner_of(state_dir)
        units = unit_files(processes, UnitOptions(folder=str(state_dir / VARIABLES), user=owner))
        return units, variable_files(processes, inherited())
    except (PlanRefused, CannotWriteUnit) as refused:
        fail(str(refused))


def owner_of(state_dir: Path) -> str:
    """The user that the processes run as: the one who types, to whom the files must belong; exits if they do not."""
    owner = pwd.getpwuid(state_dir.stat().st_uid).pw_name
    if state_dir.stat().st_uid != os.geteuid():
        fail(f"{state_dir} belongs to {owner}: write the units as {owner} with --out, and copy them.")
    return owner


def processes_of(config: Path | None, name: str, state_dir: Path) -> Sequence[ProcessPlan]:
    """What this host runs. Raises PlanRefused."""
    from services.launcher.system import machine
    from services.launcher.system.plan import plan_system
    from services.launcher.system.up import narrowed, with_model_folder

    options = host_options(config, name, state_dir)
    models = tuple(map(with_model_folder, options.models))
    above = max(options.port, options.collector_port, options.nats_port)
    ports = machine.free_ports(options.host, above, options.routers) if options.routers > 1 else ()
    options = msgspec.structs.replace(options, models=models, router_ports=ports)
    return plan_system(options, narrowed(machine.describe_machine(), options)).processes


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


def inherited() -> dict[str, str]:
    """The variables of this environment that processes of Baton read."""
    from services.launcher.fleet.fleet_file import FOR_SERVICES, FOR_WORKERS
    from services.launcher.system.machine import inherited_environment

    names = (*FOR_SERVICES, *FOR_WORKERS, *TO_FIND_PROGRAMS)
    return {key: value for key, value in inherited_environment().items() if key.startswith(names)}


def write(folder: Path, files: Sequence[File]) -> None:
    """Replace these files. Raises OSError."""
    from services.launcher.cluster.files import write_private

    folder.mkdir(parents=True, exist_ok=True)
    for each in files:
        if each.is_secret:
            write_private(folder / each.name, each.text.encode())
        else:
            (folder / each.name).write_text(each.text, encoding="utf-8")


def remove_others(folder: Path, files: Sequence[File]) -> None:
    """Delete the variables of processes that this host no longer runs. Raises OSError."""
    kept = {each.name for each in files}
    for file in folder.glob("*.env"):
        if file.name not in kept:
            file.unlink()
