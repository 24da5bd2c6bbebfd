#!/usr/bin/env bash
# Builds images with buildah, without a container engine and without user namespaces:
#
#     deploy/build_images.sh cpu ray
#     BASE_IMAGE=debian deploy/build_images.sh cpu        # makes the base with debootstrap, without a registry
#     deploy/build_images.sh cpu -- --platform linux/arm64 --build-arg PIP_INDEX_URL=https://pypi.example.com/simple
#
# Needs root, or `buildah unshare`. Arguments after -- are buildah's. Prints what takes the space of each image.
# BUILDAH_ISOLATION (chroot) and STORAGE_DRIVER (vfs) can be changed where the machine allows more, ENGINE_ROOT is the
# folder of the images, DEBIAN_MIRROR where debootstrap downloads from.
set -euo pipefail
cd "$(dirname "$0")/.."

export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}
storage=(--storage-driver "${STORAGE_DRIVER:-vfs}")
if [[ -n ${ENGINE_ROOT:-} ]]; then
    storage+=(--root "$ENGINE_ROOT/storage" --runroot "$ENGINE_ROOT/run")
fi

buildah() { command buildah "${storage[@]}" "$@"; }

# Make localhost/tessera-base from Debian's packages: what python:3.12-slim-bookworm is made of, but Python, which the
# Dockerfile installs.
make_base() {
    if buildah inspect --type image localhost/tessera-base > /dev/null 2>&1; then return; fi
    local folder container
    folder=$(mktemp --directory)
    debootstrap --variant=minbase --include=ca-certificates bookworm "$folder" \
        "${DEBIAN_MIRROR:-http://deb.debian.org/debian}"
    rm -rf "$folder"/var/cache/apt/archives/*.deb "$folder"/var/lib/apt/lists/* "$folder"/var/log/*.log \
        "$folder"/usr/share/{doc,man,locale}/*
    container=$(buildah from scratch)
    buildah copy --quiet "$container" "$folder" /
    buildah commit --quiet --rm "$container" localhost/tessera-base
    rm -rf --one-file-system "$folder"
}

targets=()
while [[ $# -gt 0 && $1 != -- ]]; do targets+=("$1"); shift; done
if [[ ${1:-} == -- ]]; then shift; fi
if [[ ${#targets[@]} -eq 0 ]]; then targets=(cpu); fi

base=()
if [[ ${BASE_IMAGE:-} == debian ]]; then
    make_base
    base=(--build-arg BASE_IMAGE=localhost/tessera-base)
elif [[ -n ${BASE_IMAGE:-} ]]; then
    base=(--build-arg "BASE_IMAGE=$BASE_IMAGE")
fi

for target in "${targets[@]}"; do
    # Docker's format has the health check, which OCI's lacks.
    buildah build --format docker --layers --target "$target" --tag "tessera:$target" "${base[@]}" \
        --build-arg "REVISION=$(git rev-parse HEAD 2> /dev/null || echo unknown)" "$@" .
    container=$(buildah from --pull-never "tessera:$target")
    root=$(buildah mount "$container")
    echo "tessera:$target, $(du --summarize --block-size=1MB "$root" | cut -f 1) MB uncompressed, of these:"
    du --block-size=1MB "$root"/opt/tessera/lib/python3*/site-packages/*/ "$root"/{usr,var,opt/tessera} \
        --max-depth=0 2> /dev/null | sort --reverse --numeric-sort | head -n 14 | sed "s|$root||"
    buildah rm "$container" > /dev/null
done
