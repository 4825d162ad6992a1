#!/bin/sh
# Makes .venv-llama with llama.cpp's server for Python, a server that is not ours, which a nightly test attaches workers to. Its
# C++ is built from source, which takes a quarter of an hour on two slow cores, once. Never an error: without it the test is
# skipped, which pytest's summary says. TEST_TOOLS=none leaves the machine as it is.
set -u
cd "$(dirname "$0")/.."

venv=.venv-llama
lock=requirements/llama.txt
[ "${TEST_TOOLS:-}" != none ] || exit 0
cmp -s "$lock" "$venv/installed.txt" && exit 0

echo "setup: building llama.cpp's server, which a nightly test needs ($venv; some minutes)"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if .venv/bin/python -m venv --clear "$venv" >"$log" 2>&1 \
    && CMAKE_ARGS="-DGGML_NATIVE=OFF -DMTMD_BUILD=OFF" nice -n 19 "$venv/bin/python" -m pip install --quiet \
        --require-hashes --requirement "$lock" >>"$log" 2>&1; then
    cp "$lock" "$venv/installed.txt"
else
    echo "setup: it could not be built (it needs a C++ compiler), so its test is skipped:"
    tail -n 3 "$log" | sed 's/^/  /'
fi
exit 0
