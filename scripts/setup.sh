#!/bin/sh
# Finds a Python that the locked requirements are for, and lets it make the environment (see setup.py).
set -eu
cd "$(dirname "$0")/.."

if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
    echo "Baton's locked packages are for Linux on x86_64; this is $(uname -s) on $(uname -m)." >&2
    echo "A Linux virtual machine, or docker compose on an x86_64 host, is the way to run it from here." >&2
    exit 1
fi

no_venv=""
for candidate in ${BATON_PYTHON:-} python3.11 /usr/bin/python3.11 python3 "$(uv python find 3.11 2>/dev/null || true)"; do
    path=$(command -v "$candidate") || continue
    "$path" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || continue
    if "$path" -c 'import ensurepip, venv' 2>/dev/null; then
        exec "$path" scripts/setup.py "$@"
    fi
    no_venv=$path
done

if [ -n "$no_venv" ]; then
    echo "$no_venv cannot make virtual environments. Install the missing part: apt-get install python3.11-venv" >&2
else
    echo "Baton needs Python 3.11 (its packages are locked for it), and none was found on this machine." >&2
    echo "Install one: 'apt-get install python3.11 python3.11-venv' (Debian 12), 'dnf install python3.11'," >&2
    echo "or 'uv python install 3.11'. If it is not on the PATH: make setup BATON_PYTHON=/path/to/python3.11" >&2
fi
exit 1
