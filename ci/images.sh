#!/bin/sh
# images.sh FILE: the images that docker-compose.yml takes from registries, by digest, as a file for
# `docker compose --env-file FILE`. A release has it; one whose tag cannot be resolved writes nothing and fails.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
made=$(mktemp)
trap 'rm -f "$made"' EXIT
grep -o '\${HEADRACE_[A-Z]*_IMAGE:-[^}]*}' "$root/docker-compose.yml" | sort -u | tr -d '${}' | while IFS= read -r each; do
    name=${each%%:-*} image=${each#*:-}
    digest=$(docker buildx imagetools inspect "$image" --format '{{.Manifest.Digest}}')
    echo "$digest" | grep -qxE 'sha256:[0-9a-f]{64}' || {
        echo "images.sh: $image has no digest ($digest): a release names no image by its tag alone" >&2
        exit 1
    }
    echo "$name=$image@$digest" >>"$made"
done
test -s "$made"
cp "$made" "$1"
