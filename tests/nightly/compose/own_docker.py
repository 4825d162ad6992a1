"""A Docker of our own, for root on Debian where none runs: Debian's packages, a daemon below a folder, and stand-ins for
the images of registries. At its end nothing is left of it but the packages.

The daemon has no bridge and writes neither firewall rules nor sysctls: containers meet on compose's own networks,
Docker's proxy publishes their ports, and builds use this machine's network.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.nats_server import find_nats_server
from tests.support.processes import ROOT

COMPOSE_RELEASE = "trixie"
"""The first Debian with version 2 of compose. Its package has one program, which runs on older releases, too."""
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
PROGRAMS = ("dockerd", "docker", "iptables", "debootstrap", "setpriv", "unshare")
PACKAGES = "ca-certificates,python3,python3-pip,python3-venv,libpython3-dev,busybox"
"""With the header files that the image of Python has, too, and the busybox of NATS's image."""
WHEELS_FOLDER = "/usr/share/wheels"
"""In the stand-in of the image of Python."""
INSTALL_S_MAX = 900
BUILD_S_MAX = 3000
"""debootstrap and the stand-ins: two minutes, or many on a busy machine with slow disks."""
START_S_MAX = 60
STOP_S_MAX = 60
POLL_S = 0.2


class CannotRun(Exception):
    """The reason, for the summary of skipped tests."""


def run(command: Sequence[str], environment: Mapping[str, str] | None = None, s_max: float = INSTALL_S_MAX) -> str:
    """The command's output. Raises CannotRun with the last line it wrote."""
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=s_max,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotRun(str(error)) from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise CannotRun(f"{' '.join(command[:2])}: {said[-1] if said else done.returncode}")
    return done.stdout


def install() -> None:
    """Docker's engine and debootstrap. Raises CannotRun."""
    if os.getuid() != 0 or shutil.which("apt-get") is None or not KEYRING.exists():
        raise CannotRun(
            "docker, its compose plugin or its daemon is missing, and only root on Debian can mend that here"
        )
    run([str(ROOT / "scripts/test_tools.sh"), "containers"])
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise CannotRun(f"docker cannot run here: {', '.join(missing)} could not be installed")


def mirror() -> str:
    """From which apt installs Debian here. Raises CannotRun."""
    form = "$(ORIGIN) $(RELEASE) $(SITE)"
    for line in run(["apt-get", "indextargets", "--format", form, "Created-By: Packages"]).splitlines():
        origin, release, site = line.split()
        if origin == "Debian" and "-" not in release:  # Without -updates and -security.
            return site
    raise CannotRun("apt knows no mirror of Debian")


def add_compose(folder: Path) -> dict[str, str]:
    """The environment in which `docker compose` works: with the plugin of a newer release in ``folder``, the rest of the
    system untouched. Raises CannotRun.
    """
    install()
    for name in ("lists/partial", "package", "config/cli-plugins"):
        (folder / name).mkdir(parents=True)
    sources = folder / "sources.list"
    sources.write_text(f"deb [signed-by={KEYRING}] {mirror()} {COMPOSE_RELEASE} main\n")
    options = [
        f"Dir::Etc::sourcelist={sources}",
        "Dir::Etc::sourceparts=/dev/null",
        f"Dir::State::lists={folder}/lists",
    ]
    options += ["Dir::Cache::pkgcache=", "Dir::Cache::srcpkgcache=", "APT::Sandbox::User=root"]
    apt = ["apt-get", *(part for option in options for part in ("-o", option))]
    run([*apt, "update"])
    run(["sh", "-c", 'cd "$0" && exec "$@"', str(folder), *apt, "download", "docker-compose"])
    (package,) = folder.glob("docker-compose_*.deb")
    run(["dpkg", "-x", str(package), str(folder / "package")])
    plugin = folder / "package/usr/libexec/docker/cli-plugins/docker-compose"
    (folder / "config/cli-plugins/docker-compose").symlink_to(plugin)
    return {**os.environ, "DOCKER_CONFIG": str(folder / "config")}


@contextlib.contextmanager
def own_docker(environment: Mapping[str, str], images: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """A daemon with stand-ins for ``images``, by "python", "nats" and "prometheus"; gives its environment. Raises
    CannotRun.
    """
    install()
    with tempfile.TemporaryDirectory(prefix="baton-docker-") as name, daemon(Path(name), environment) as ours:
        make_stand_ins(Path(name), ours, images)
        build_network = Path(name, "build-network.yaml")
        builders = {name: {"build": {"network": "host"}} for name in ("init", "prefill")}
        build_network.write_text(json.dumps({"services": builders}))
        yield {**ours, "COMPOSE_FILE": f"{ROOT / 'compose.yaml'}:{build_network}"}


@contextlib.contextmanager
def daemon(folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """dockerd, in a mount namespace of its own: its mounts end with it. It stops, with its containers, when the tests are
    killed.
    """
    options = [f"--{name}={folder / name}" for name in ("data-root", "exec-root", "pidfile")]
    options += ["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false", "--bridge=none"]
    host = f"unix://{folder / 'socket'}"
    groups = cgroups()
    with Path(folder, "log").open("w") as log:
        dockerd = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", "unshare", "--mount", "dockerd", "--host", host, *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    ours = {**environment, "DOCKER_HOST": host}
    try:
        wait_for(dockerd, ours, folder / "log")
        yield ours
    finally:
        dockerd.terminate()
        try:
            dockerd.wait(STOP_S_MAX)
        finally:
            dockerd.kill()
            dockerd.wait()
            remove_cgroups(cgroups() - groups)


def cgroups() -> set[Path]:
    """Docker's, which it leaves behind empty."""
    return set(Path("/sys/fs/cgroup").glob("*/docker"))


def remove_cgroups(groups: set[Path]) -> None:
    """With those in them, such as BuildKit's."""
    for group in groups:
        for folder, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):  # Another daemon may use it by now.
                Path(folder).rmdir()


def wait_for(dockerd: subprocess.Popen[bytes], environment: Mapping[str, str], log: Path) -> None:
    """Until it answers. Raises CannotRun with the end of its log."""
    deadline = time.monotonic() + START_S_MAX
    while True:
        try:
            run(["docker", "version"], environment)
            return
        except CannotRun as error:
            if dockerd.poll() is not None or time.monotonic() > deadline:
                raise CannotRun(f"dockerd does not start: {log.read_text()[-500:]}") from error
            time.sleep(POLL_S)


def make_stand_ins(folder: Path, environment: Mapping[str, str], images: Mapping[str, str]) -> None:
    """Build them. Raises CannotRun."""
    release = images["python"].rpartition("-")[2]
    root, context = folder / "root", folder / "context"
    context.mkdir()
    # In a mount namespace of its own, so that no /proc stays mounted where files are deleted.
    debootstrap = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", release, str(root), mirror()]
    run(["unshare", "--mount", *debootstrap], s_max=BUILD_S_MAX)
    imported = 'tar -C "$0" -c . | docker import - baton-debootstrap'
    run(["sh", "-c", imported, str(root)], environment, BUILD_S_MAX)
    shutil.rmtree(root)
    shutil.copy(find_nats_server(), context / "nats-server")
    shutil.copy(AUTHORITIES, context / AUTHORITIES.name)
    if prometheus := shutil.which("prometheus"):
        shutil.copy(prometheus, context / "prometheus")
    (context / "pip.conf").write_text(pip_settings())
    (context / "wheels").mkdir()
    for wheel in local_wheels():
        shutil.copy(wheel, context / "wheels")
    file = Path(__file__).with_name("stand_ins.Dockerfile")
    for target, image in images.items():
        build = ["docker", "build", "--network=host", "--target", target, "--tag", image, "--file", str(file)]
        run([*build, str(context)], environment, BUILD_S_MAX)


def pip_settings() -> str:
    """This machine's package indexes, as far as containers reach them, and the folder with its wheels."""
    settings = {"find-links": WHEELS_FOLDER}
    for name, value in pip_configuration():
        if name == "trusted-host" or (name in {"index-url", "extra-index-url"} and value.startswith("http")):
            settings.setdefault(name, value)
    return "\n".join(["[global]", *(f"{name} = {value}" for name, value in settings.items())]) + "\n"


def local_wheels() -> list[Path]:
    """Wheels of PyTorch in folders where pip looks for packages: its CPU build is on no index but PyTorch's own."""
    folders = [folder for name, value in pip_configuration() if name == "find-links" for folder in value.split()]
    return [wheel for folder in dict.fromkeys(folders) for wheel in Path(folder).glob("torch-*+cpu-*.whl")]


def pip_configuration() -> Iterator[tuple[str, str]]:
    """Names and values; those of variables come before those of files."""
    for line in run([sys.executable, "-m", "pip", "config", "list"]).splitlines():
        name, _, value = line.partition("=")
        yield name.rpartition(".")[2], value.strip("'\"")
