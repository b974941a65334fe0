#!/usr/bin/env bash
# Installs the packages that a build needs, and others, with apt, or prints the command that does.
#   setup.sh [COMMAND_OR_FILE=PACKAGE ...]
# A package counts as installed if its command is on PATH or its file (or glob pattern) exists.
set -euo pipefail
build=(make=make gcc=gcc python3=python3 /usr/include/stdlib.h=libc6-dev
    /usr/include/jansson.h=libjansson-dev /usr/include/pcre2.h=libpcre2-dev
    /usr/include/uninorm.h=libunistring-dev)
missing=()
for pair in "${build[@]}" "$@"; do
    { compgen -G "${pair%%=*}" || command -v "${pair%%=*}"; } > /dev/null || missing+=("${pair#*=}")
done
[ ${#missing[@]} -eq 0 ] && exit 0
[ -e /usr/include/histedit.h ] || missing+=(libedit-dev)        # line editing in --chat; optional
install="apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends ${missing[*]}"
fail() {
    printf 'error: %s\nhint: run: sudo apt-get update && sudo %s\n' "$1" "$install" >&2
    exit 2
}
sudo=
[ "$(id -u)" -eq 0 ] || sudo=sudo
if ! command -v apt-get > /dev/null || { [ -n "$sudo" ] && ! sudo -n true 2> /dev/null; }; then
    fail "missing packages: ${missing[*]}"
fi
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
# package lists may be out of date: refresh them once if the install fails
log=$($sudo $install 2>&1) ||
    log=$({ $sudo apt-get -o DPkg::Lock::Timeout=300 update && $sudo $install; } 2>&1) || {
    tail -n 5 <<< "$log" >&2
    fail "apt could not install ${missing[*]}"
}
