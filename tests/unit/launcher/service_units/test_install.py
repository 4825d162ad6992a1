"""`baton service install`: options that do not fit, and programs that are not here, end with what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from services.launcher.cli import app

FLEET = """
engine = "simulated"
[[host]]
name = "one"
address = "127.0.0.1"
workers = [{ role = "both" }]
"""
QUADLET, SLURM, COMPOSE = ("--kind", "quadlet"), ("--kind", "slurm"), ("--kind", "compose")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET)
    with mock.patch.dict(os.environ):  # The command sets variables of its process.
        yield file


def install(fleet: Path, *options: str, path: str = "/nowhere") -> tuple[int, str]:
    done = CliRunner().invoke(
        app,
        ["service", "install", "--config", str(fleet), "--state-dir", str(fleet.parent / "state"), *options],
        env={"PATH": path, "COLUMNS": "200"},
    )
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (QUADLET, "--kind quadlet needs --image"),
        (COMPOSE, "--kind compose needs --image"),
        ((*COMPOSE, "--image", "x", "--user"), "--user has no effect with --kind compose"),
        ((*COMPOSE, "--image", "x"), "Docker is not here"),
        (("--image", "x"), "--image is for containers: add --kind quadlet or --kind compose"),
        ((*SLURM, "--user"), "--user has no effect with --kind slurm"),
        ((*SLURM, "--name", "one"), "--name has no effect with --kind slurm"),
        (SLURM, "sbatch was not found"),
        ((*QUADLET, "--image", "x"), "Podman 4.5 or newer is not here"),
        ((*QUADLET, "--image", "x", "--name", "two", "--print"), "no host has the name 'two'"),
    ],
)
def test_what_does_not_fit_is_refused(fleet: Path, options: tuple[str, ...], text: str):
    code, output = install(fleet, *options)

    assert code == 1
    assert text in " ".join(output.split())


def test_an_old_podman_is_refused(fleet: Path):
    podman = fleet.parent / "podman"
    podman.write_text("#!/bin/sh\necho podman version 4.3.1\n")
    podman.chmod(0o755)

    code, output = install(fleet, *QUADLET, "--image", "x", path=str(fleet.parent))

    assert code == 1
    assert "Podman 4.5 or newer is not here" in output


def test_a_unit_runs_the_host_with_the_variables_of_the_shell_and_the_first_api_key_is_shown(fleet: Path):
    out, state = fleet.parent / "units", fleet.parent / "state"

    code, output = install(fleet, "--name", "one", "--out", str(out))

    assert code == 0, output
    unit = (out / "baton.service").read_text()
    assert f"up --config {fleet} --name one --keep-trying --state-dir {state}" in unit
    assert f"EnvironmentFile={state}/service.env" in unit
    assert (state / "service.env").stat().st_mode & 0o777 == 0o600
    assert 'PATH="/nowhere"' in (state / "service.env").read_text()
    assert "The first API key" in output
    assert "systemctl daemon-reload && systemctl enable --now baton" in output


def test_variables_of_the_fleet_file_stay_in_the_fleet_file(fleet: Path):
    """The host reads them at each start, where a variable of its environment takes precedence."""
    fleet.write_text(f"env = {{ WORKER_LEGS_MAX = 7 }}\n{FLEET}")

    code, output = install(fleet, "--name", "one", "--out", str(fleet.parent))

    assert code == 0, output
    assert "WORKER_LEGS_MAX" not in (fleet.parent / "state" / "service.env").read_text()


def test_files_and_folders_of_a_container_are_written(fleet: Path):
    out, state = fleet.parent / "units", fleet.parent / "state"

    code, output = install(fleet, *QUADLET, "--image", "localhost/x", "--name", "one", "--out", str(out))

    assert code == 0, output
    assert f"Exec=baton up --config {fleet} --name one" in (out / "baton.container").read_text()
    assert f"Volume={fleet}:{fleet}:ro" in (out / "baton.container").read_text()
    assert (state / "service.env").stat().st_mode & 0o777 == 0o600
    assert (state / "cache").is_dir()
    assert "Copy it to /etc/containers/systemd, then:" in " ".join(output.split())


def test_a_compose_file_has_the_variables_and_is_for_its_owner_only(fleet: Path):
    out = fleet.parent / "files"

    code, output = install(fleet, *COMPOSE, "--image", "localhost/x", "--name", "one", "--out", str(out))

    assert code == 0, output
    assert (out / "baton.compose.yaml").stat().st_mode & 0o777 == 0o600
    assert not (fleet.parent / "state" / "service.env").exists()
    assert (fleet.parent / "state" / "cache").is_dir()
    assert "docker compose -f baton.compose.yaml up -d" in output


def test_the_first_api_key_of_a_job_is_shown_here_and_not_in_its_output(fleet: Path):
    code, output = install(fleet, *SLURM, "--out", str(fleet.parent))

    assert code == 0, output
    assert "The first API key" in output
    assert (fleet.parent / "state" / "cluster" / "router" / "keys.toml").is_file()
    assert "baton.sbatch    # with your options" in output


@pytest.mark.parametrize(
    "options", [("--name", "one"), *((*kind, "--image", "x", "--name", "one") for kind in (QUADLET, COMPOSE)), SLURM]
)
def test_print_writes_nothing_and_shows_what_would_be_written(fleet: Path, options: tuple[str, ...]):
    before = sorted(fleet.parent.rglob("*"))

    code, printed = install(fleet, *options, "--print")

    assert code == 0, printed
    assert sorted(fleet.parent.rglob("*")) == before
    assert "API key" not in printed
    out = fleet.parent / "units"
    code, output = install(fleet, *options, "--out", str(out))
    assert code == 0, output
    (written,) = out.iterdir()
    assert printed.startswith(f"# {written.name}\n{written.read_text()}")


def test_print_on_a_host_that_has_not_joined_writes_nothing_and_names_the_commands(fleet: Path):
    fleet.write_text(f'{FLEET}[[host]]\nname = "two"\nworkers = [{{ role = "both" }}]\n')
    before = sorted(fleet.parent.rglob("*"))

    code, output = install(fleet, "--name", "two", "--print")

    assert code == 1
    assert "baton join TOKEN" in " ".join(output.split())
    assert sorted(fleet.parent.rglob("*")) == before
