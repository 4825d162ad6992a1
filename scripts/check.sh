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
part settings "$bin/python" -m scripts.make_configuration_page --check
part structure "$bin/python" scripts/check_structure.py
part tests "$bin/python" -m pytest -n "${JOBS:-2}" -m "not nats and not vllm and not gpu and not compose" \
    tests/unit tests/contracts tests/properties tests/scenarios

[ -z "$failed" ] || { echo "check failed:$failed" >&2; exit 1; }
