#!/bin/sh
# The gate. Every part runs even when an earlier one fails, so that one run names everything there is to mend.
set -u
cd "$(dirname "$0")/.."
failed=""

part() {
    name=$1
    shift
    started=$(date +%s)
    if output=$("$@" 2>&1); then
        printf '  ok      %-12s %s s\n' "$name" "$(($(date +%s) - started))"
    else
        printf '  FAILED  %-12s %s\n%s\n' "$name" "$*" "$output"
        failed="$failed $name"
    fi
}

bin=.venv/bin
part format "$bin/ruff" format --check --quiet .
part lint "$bin/ruff" check --quiet .
part types "$bin/mypy"
part layers "$bin/lint-imports"
part generated "$bin/python" -m shared.contracts.catalogue --check
# shellcheck disable=SC2046  # a list of folders
part tests "$bin/python" -m pytest -q -m "not nats and not vllm and not gpu and not compose" \
    $(for part in architecture unit contracts properties scenarios; do [ -d "tests/$part" ] && echo "tests/$part"; done)

[ -z "$failed" ] || { echo "check failed:$failed" >&2; exit 1; }
