#!/usr/bin/env bash
# Checks that the tree and dist/ are the release of a tag, writes dist/SHA256SUMS, and prints what
# is to be published: the files and CHANGELOG.md's section.
#
#   scripts/release.sh v0.2.0
set -euo pipefail
cd "$(dirname "$0")/.."
die() { echo "release: $*" >&2 && exit 1; }

version=${1#v}
[ "$1" = "v$version" ] || die "$1 is no tag of a release, such as v0.2.0"
named='^version = "[^"]*|kvplane-(blocks|kernels)==[^"]*|KVPLANE_VERSION=.*|newTag: .*'
others=$(grep -oE "$named" pyproject.toml csrc/{,blocks/}pyproject.toml .env \
  deploy/kubernetes/*/kustomization.yaml | grep -vE "[\"= ]${version//./\\.}$" || true)
[ -z "$others" ] || die "not of $version:"$'\n'"$others"
notes=$(sed "1,/^## \[${version//./\\.}\] - 20/d; /^## /,\$d" CHANGELOG.md)
[ -n "${notes//[[:space:]]/}" ] || die "CHANGELOG.md has no dated section of $version"
for name in kvplane kvplane_blocks kvplane_kernels; do
  compgen -G "dist/$name-$version-*.whl" >/dev/null || die "dist/ has no wheel of $name $version"
done
(cd dist && sha256sum ./*.whl | tee SHA256SUMS)
printf '%s\n' "$notes" | tee dist/NOTES.md
