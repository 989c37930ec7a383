#!/usr/bin/env bash
# Executes the Dockerfile where no engine runs: its steps in order in a fresh Debian 12 root, then the entry point as users
# without a name, without network. Needs root, Debian or Ubuntu, the registries, 25 GB; half an hour.
#   bash tests/docker/run.sh              as `docker build .`
#   bash tests/docker/run.sh DEVICE=cpu   build arguments
# The base differs from the image's in this: Python is Debian's 3.11.2 under /usr/bin (linked into /usr/local/bin), and its
# packages are Debian's of today. Everything else is done as an engine would.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/record.sh
apt-get install -y -q --no-install-recommends debootstrap iproute2
work=$(mktemp -d /var/tmp/dyad-image.XXXXXX) # mounts are made in namespaces of their own, so there is nothing to unmount
trap 'rm -rf --one-file-system "$work"' EXIT

# the mirror and the proxy that this machine uses, and pip's index if a file names one
# shellcheck disable=SC2016 # apt's own variable
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Codename: bookworm' 'Component: main' 'Created-By: Packages' | sed -n 1p)
eval "$(apt-config shell http_proxy Acquire::http::Proxy https_proxy Acquire::https::Proxy)"
export http_proxy https_proxy
if index=$(python3 -m pip config get global.index-url 2>/dev/null); then export PIP_INDEX_URL=${PIP_INDEX_URL:-$index}; fi

packages=python3,python3-venv,ca-certificates,netbase,tzdata
debootstrap --variant=minbase --include="$packages" bookworm "$work/base" ${mirror:+"$mirror"} >"$work/debootstrap.log"
for name in python3.11 python3 python; do ln -s /usr/bin/python3.11 "$work/base/usr/local/bin/$name"; done
printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$(hostname)" >"$work/base/etc/hosts" # as an engine does
nice -n 10 python3 -m tests.docker.build "$work/base" "$work" "$@"
record tests/docker/run.sh "the image built${*:+ with $*}, and every word of its entry point"
