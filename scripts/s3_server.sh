#!/bin/sh
# Makes .venv-s3 with moto, a server that speaks S3, for nightly tests of objects below a store's files. Never an error:
# without it the tests are skipped, which pytest's summary says. TEST_TOOLS=none leaves the machine as it is.
set -u
cd "$(dirname "$0")/.."

venv=.venv-s3
lock=requirements/s3.txt
[ "${TEST_TOOLS:-}" != none ] || exit 0
cmp -s "$lock" "$venv/installed.txt" && exit 0

echo "setup: installing an S3 server, which nightly tests need ($venv)"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if .venv/bin/python -m venv --clear "$venv" >"$log" 2>&1 \
    && "$venv/bin/python" -m pip install --quiet --require-hashes --requirement "$lock" >>"$log" 2>&1; then
    cp "$lock" "$venv/installed.txt"
else
    echo "setup: it could not be installed, so its tests are skipped:"
    tail -n 3 "$log" | sed 's/^/  /'
fi
exit 0
