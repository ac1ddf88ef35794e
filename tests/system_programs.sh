#!/bin/sh
# Installs the system programs that some tests run, if they are missing, by Debian's packages: `make programs`.
# Never asks for anything. What it cannot install it names in one line, and the tests that need it are skipped.
# With the argument `containers` it installs what `make install-test` runs, and nothing else.
# PYTHON is the interpreter of .venv (default: python3).

PATH=$PATH:/usr/sbin:/sbin # for tc, which users' own PATH lacks on Debian
missing=
need() { # PACKAGE PROGRAM...: any of the programs will do
    package=$1
    shift
    for program; do
        if command -v "$program" >/dev/null; then return; fi
    done
    case " $missing " in *" $package "*) ;; *) missing="$missing $package" ;; esac
}

if [ "${1:-}" = containers ]; then
    need podman podman
    need buildah buildah
    need runc runc
    need mmdebstrap mmdebstrap # the image that the Dockerfile begins with
    need iptables iptables     # addresses of pods
    need netavark netavark /usr/lib/podman/netavark
    need catatonit catatonit /usr/libexec/podman/catatonit # a pod's first process
else
    "${PYTHON:-python3}" -c 'import ensurepip, venv' 2>/dev/null || missing="$missing python3-venv"
    need g++ c++ g++ clang++                               # kernels of CPUs
    need chromium chromium chromium-browser google-chrome # the page in a browser
    need curl curl                                        # examples
    need iproute2 ip                                      # shaped and cut links
    need iproute2 tc
    need prometheus prometheus                            # rules and dashboards
    need prometheus promtool
fi
[ -n "$missing" ] || exit 0

give_up() {
    echo "not installed: $(echo $missing | sed 's/ /, /g') ($1); tests that need them are skipped"
    exit 0
}

command -v apt-get >/dev/null || give_up "no apt-get; other systems have packages of similar names"
as_root=
if [ "$(id -u)" != 0 ]; then
    as_root="sudo -n"
    $as_root true 2>/dev/null || give_up "as root: apt-get install --no-install-recommends$missing"
fi
echo "installing system packages for tests:$missing"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt() {
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 -o Acquire::Retries=1 "$@" \
        </dev/null >>"$log" 2>&1
}
had_prometheus=$(command -v prometheus)
apt update
left=
# One by one: a distribution may lack one of them.
for package in $missing; do
    apt install -y --no-install-recommends "$package" || left="$left $package"
done
# Tests start a Prometheus of their own; a service on this machine was not asked for.
if [ -z "$had_prometheus" ] && [ -d /run/systemd/system ]; then
    $as_root systemctl disable --quiet --now prometheus 2>/dev/null
fi
missing=$left
[ -z "$missing" ] || { grep '^E:' "$log" | sort -u; give_up "apt-get failed"; }
