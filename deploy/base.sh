#!/usr/bin/env bash
# Makes a base for deploy/Containerfile of Debian's packages alone, where no registry can be reached:
#   deploy/base.sh localhost/rollbook-base          (as root, with mmdebstrap and podman; 1 to 3 minutes)
#   podman build -f deploy/Containerfile --build-arg BASE=localhost/rollbook-base --target recorder -t rollbook:recorder .
# SUITE and MIRROR name another release of Debian, with Python 3.11 or newer, and another mirror.
set -euo pipefail
image=${1:?name the image to make, such as localhost/rollbook-base}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mmdebstrap --variant=essential --include=python3-minimal,python3-venv,ca-certificates,libstdc++6 \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/info/*' \
  "${SUITE:-bookworm}" "$work/base.tar" ${MIRROR:-}
podman import --change 'ENV LANG=C.UTF-8' "$work/base.tar" "$image"
