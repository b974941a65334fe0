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
    have=${pair%%=*} package=${pair#*=}
    case $have in
        /*) compgen -G "$have" > /dev/null || missing+=("$package") ;;
        *) command -v "$have" > /dev/null || missing+=("$package") ;;
    esac
done
[ ${#missing[@]} -eq 0 ] && exit 0
[ -e /usr/include/histedit.h ] || missing+=(libedit-dev)        # line editing in --chat; optional
install="apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends ${missing[*]}"
sudo=
[ "$(id -u)" -eq 0 ] || sudo=sudo
if ! command -v apt-get > /dev/null || { [ -n "$sudo" ] && ! sudo -n true 2> /dev/null; }; then
    echo "error: missing packages: ${missing[*]}" >&2
    echo "hint: run: sudo apt-get update && sudo $install" >&2
    exit 2
fi
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
quiet=$(mktemp)
trap 'rm -f "$quiet"' EXIT
# package lists may be out of date: refresh them once if the install fails
refresh_and_install() { $sudo apt-get -o DPkg::Lock::Timeout=300 update && $sudo $install; }
$sudo $install > "$quiet" 2>&1 || refresh_and_install > "$quiet" 2>&1 || {
    tail -n 5 "$quiet" >&2
    echo "error: apt could not install ${missing[*]}" >&2
    echo "hint: run: sudo apt-get update && sudo $install" >&2
    exit 2
}
