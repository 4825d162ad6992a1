#!/bin/sh
# Finds a Python that the locked requirements are for, and lets it make the environment (see setup.py).
set -eu
cd "$(dirname "$0")/.."

if [ "$(uname -s)" != Linux ] || { [ "$(uname -m)" != x86_64 ] && [ "$(uname -m)" != aarch64 ]; }; then
    echo "Baton's locked packages are for Linux on x86-64 and Arm (aarch64); this is $(uname -s) on $(uname -m)." >&2
    echo "A Linux virtual machine, or docker compose, is the way to run it from here." >&2
    exit 1
fi

fits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null
}

# The Python of the environment that is there comes before others: with another one everything is installed anew.
made_with=$(sed -n 's/^executable = //p' .venv/pyvenv.cfg 2>/dev/null || true)
no_venv=""
for candidate in ${BATON_PYTHON:-"$made_with" python3 python3.12 python3.11 python3.13}; do
    path=$(command -v "$candidate") || continue
    fits "$path" || continue
    if "$path" -c 'import ensurepip, venv' 2>/dev/null; then
        exec "$path" scripts/setup.py "$@"
    fi
    no_venv=$path
done

if [ -n "$no_venv" ]; then
    version=$("$no_venv" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "$no_venv cannot make virtual environments. Install the missing part: apt-get install python$version-venv" >&2
    exit 1
fi
if [ -n "${BATON_PYTHON:-}" ]; then
    echo "BATON_PYTHON=$BATON_PYTHON is no Python 3.11, 3.12 or 3.13, which Baton's packages are locked for." >&2
    exit 1
fi

# No Python of these versions. uv brings one of its own, which leaves those of the system alone.
if command -v uv >/dev/null; then
    if ! path=$(uv python find --no-project --managed-python 3.12 2>/dev/null); then
        echo "setup: no Python 3.11, 3.12 or 3.13 found: uv downloads 3.12 (30 MB) into $(uv python dir)" >&2
        uv python install 3.12 >&2
        path=$(uv python find --no-project --managed-python 3.12)
    fi
    exec "$path" scripts/setup.py "$@"
fi
echo "Baton needs Python 3.11, 3.12 or 3.13, and none was found on this machine. Any of these brings one:" >&2
echo "  apt-get install python3 python3-venv     Debian 12 and 13, Ubuntu 24.04" >&2
echo "  dnf install python3.12                   Fedora, RHEL" >&2
echo "  curl -LsSf https://astral.sh/uv/install.sh | sh     uv, which brings Python on the next try, without root" >&2
echo "One that is not on the PATH: make setup BATON_PYTHON=/path/to/python3.12" >&2
exit 1
