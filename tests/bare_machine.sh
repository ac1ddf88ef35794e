#!/usr/bin/env bash
# Runs `make demo` and `make test` on bare Debian machines: root file systems with the packages that README.md names and
# no others. As root, with mmdebstrap or debootstrap:
#
#   tests/bare_machine.sh bookworm trixie
#
# Each machine gets the last commit, this machine's way to its registries (settings of pip and apt, certificates,
# proxies), and namespaces in which no mount and no process outlives the run. Variables:
#   TARGETS  make targets to run, in order (default: demo test)
#   BIND     folders that pip's settings name, mounted read-only in the same place, with spaces
#   AS       root (default), or user: an account that may not become root, whose tests of system programs are skipped
#   ROOTS    folder of the file systems, about 12 GB each (default: a new one in /tmp)
#   LOGS     folder of the complete outputs, SUITE.log (default: ROOTS, and then ROOTS is kept)
#   KEEP     1: keep the file systems
#   MIRROR   Debian mirror (default: http://deb.debian.org/debian)
set -euo pipefail

TARGETS=${TARGETS:-demo test}
MIRROR=${MIRROR:-http://deb.debian.org/debian}
PACKAGES=python3,python3-venv,git,make,ca-certificates
PROJECT=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
export TARGETS BIND="${BIND:-}" AS="${AS:-root}"

make_root() { # SUITE ROOT
    local settings="$2.apt"
    # How apt reaches its mirrors is a matter of this machine.
    apt-config dump 2>/dev/null | grep -E '^Acquire::(Check|https?:|Retries)' >"$settings" || true
    if command -v mmdebstrap >/dev/null; then
        mmdebstrap --quiet --variant=minbase --include="$PACKAGES" --aptopt="$settings" "$1" "$2" "$MIRROR"
    else
        debootstrap --variant=minbase --include="$PACKAGES" "$1" "$2" "$MIRROR" >/dev/null
        cp "$settings" "$2/etc/apt/apt.conf.d/90-this-machine"
    fi
    rm "$settings"
    cp --dereference /etc/resolv.conf "$2/etc/resolv.conf"
    # As Debian's installer writes it.
    printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$(hostname)" >"$2/etc/hosts"
    find /usr/local/share/ca-certificates -name '*.crt' -exec cp -t "$2/usr/local/share/ca-certificates" {} +
    chroot "$2" update-ca-certificates >/dev/null
    local home="$2/srv/home" file
    mkdir -p "$home/.config/pip"
    for file in pip.conf xdg/pip; do
        [[ ! -e /etc/$file ]] || { mkdir -p "$2/etc/xdg" && cp -r "/etc/$file" "$2/etc/$file"; }
    done
    [[ ! -e ~/.config/pip/pip.conf ]] || cp ~/.config/pip/pip.conf "$home/.config/pip"
    git clone --quiet --no-hardlinks "file://$PROJECT" "$2/srv/ringserve"
    [[ $AS == root ]] || chown -R 1000:1000 "$2/srv"
}

# Runs in namespaces of its own.
run_targets() { # ROOT
    local folder name target passed=()
    mount -t proc proc "$1/proc"
    mount --rbind /sys "$1/sys"
    mount --rbind /dev "$1/dev"
    mount -t tmpfs -o mode=1777 tmpfs "$1/dev/shm"
    mount -t tmpfs -o mode=1777 tmpfs "$1/tmp"
    for folder in $BIND; do
        mkdir -p "$1/$folder"
        mount --bind "$folder" "$1/$folder"
        mount -o remount,bind,ro "$1/$folder"
    done
    for name in $(compgen -e | grep -iE '^(PIP_.*|.*_PROXY|.*SSL_CERT.*|.*CA_BUNDLE|TORCH_INDEX|PROGRAMS)$'); do
        passed+=("$name=${!name}")
    done
    local user=0:0
    [[ $AS == root ]] || user=1000:1000
    for target in $TARGETS; do
        echo "== make $target, $(nproc) cores, load $(cut -d ' ' -f 1 /proc/loadavg)"
        local start=$SECONDS status=0
        chroot --userspec=$user "$1" /usr/bin/env -i "${passed[@]}" HOME=/srv/home TERM=dumb \
            PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
            make --no-print-directory -C /srv/ringserve "$target" </dev/null 2>&1 || status=$?
        echo "== make $target: exit $status after $((SECONDS - start)) s"
        ((status == 0)) || return "$status"
    done
}

if [[ ${1:-} == --inside ]]; then
    run_targets "$2"
    exit
fi

((EUID == 0)) || { echo "only root may make file systems and mounts" >&2; exit 1; }
(($#)) || { echo "usage: tests/bare_machine.sh SUITE..., for example bookworm trixie" >&2; exit 2; }
# Whatever ends this script ends its mounts and processes too.
[[ -n ${IN_NAMESPACE:-} ]] || IN_NAMESPACE=1 exec unshare --mount --pid --fork --kill-child --mount-proc "$0" "$@"
roots=${ROOTS:-$(mktemp -d /tmp/ringserve-bare-XXXXXX)}
logs=${LOGS:-$roots}
mkdir -p "$roots" "$logs"
roots=$(realpath "$roots") logs=$(realpath "$logs")
root=
clean() {
    [[ -z $root || ${KEEP:-} == 1 ]] || rm -rf --one-file-system "$root"
    [[ ! -d $roots ]] || rmdir --ignore-fail-on-non-empty "$roots"
}
trap clean EXIT
failed=0
for suite; do
    root=$roots/$suite
    mkdir -p "$roots" # removed with the file system before, if it was empty then
    make_root "$suite" "$root"
    unshare --mount --pid --fork --kill-child "$0" --inside "$root" >"$logs/$suite.log" 2>&1 || failed=1
    echo "$suite, $(chroot "$root" python3 --version):"
    # Of each target its times, pytest's counts and what failed.
    grep -E '^(== |=+ .*(passed|failed|error)|(FAILED|ERROR) |make: \*\*\*)|tests skipped for' "$logs/$suite.log" | sed 's/^/  /'
    clean
done
echo "complete outputs: $logs"
exit "$failed"
