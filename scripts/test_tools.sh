#!/bin/sh
# Installs what some tests need and pip does not have: a browser (chromium) for the console's, prometheus with promtool for
# dashboards and alerts. Only where that takes no question: as root, on Debian and its like. Never an error: what is
# missing afterwards is said here, and tests that need it are skipped, which pytest's summary says once more.
# `test_tools.sh containers` installs docker's engine and debootstrap instead, for the tests of containers.
# TEST_TOOLS=none leaves the machine as it is.
set -u

UPDATE_S_MAX=90
INSTALL_S_MAX=300
log=$(mktemp)
policy=/usr/sbin/policy-rc.d
policy_is_ours=""

of=${1:-tests}

missing() {
    if [ "$of" = containers ]; then
        command -v dockerd >/dev/null || echo docker.io
        command -v docker >/dev/null || echo docker-cli
        command -v iptables >/dev/null || echo iptables
        command -v debootstrap >/dev/null || echo debootstrap
        return
    fi
    command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
        || echo chromium
    { command -v prometheus && command -v promtool; } >/dev/null || echo prometheus
}

tidy() {
    [ -z "$policy_is_ours" ] || rm -f "$policy"
    rm -f "$log"
}
trap tidy EXIT
trap 'exit 130' INT TERM

apt() {
    limit_s=$1
    shift
    timeout "$limit_s" env DEBIAN_FRONTEND=noninteractive \
        apt-get -q -o DPkg::Lock::Timeout=60 -o Acquire::Retries=1 -o Acquire::http::Timeout=20 "$@" >>"$log" 2>&1
}

wanted=$(missing)
[ -n "$wanted" ] && [ "${TEST_TOOLS:-}" != none ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    # Prometheus and docker would start servers of their own, which no test wants.
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy" && policy_is_ours=yes
    fi
    echo "setup: installing $(echo "$wanted" | paste -sd ' ') (apt-get), which some tests need"
    # Newer lists first; old ones will do where these cannot be had.
    apt "$UPDATE_S_MAX" update
    # One by one: a distribution that lacks one of them has the other.
    for package in $wanted; do
        apt "$INSTALL_S_MAX" install -y --no-install-recommends "$package" \
            || { echo "setup: $package could not be installed:"; tail -n 3 "$log" | sed 's/^/  /'; }
    done
fi

left=$(missing | paste -sd ' ')
[ -z "$left" ] || echo "setup: without $left the tests that need it are skipped (Debian: apt-get install $left)"
exit 0
