#!/usr/bin/env bash
# A clone of this repository in a Debian 12 with nothing but make, git and certificates, where a
# command runs as root, in the clone's folder. Afterwards all is gone but what debootstrap made.
#
#   tests/e2e/bare_debian.sh BASE COMMAND [ARG ...]     BASE: where debootstrap's tree is kept
#
# The machine's way to packages comes along: settings of apt and pip, certificates, proxies.
set -euo pipefail
base=$1 clone=/home/new/kvplane
shift
checkout=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)

if [ ! -e "$base/.made" ]; then
  mkdir -p "$base"
  debootstrap --variant=minbase --include=ca-certificates,make,git \
    bookworm "$base" >"$base.log" 2>&1 ||
    { tail -n 3 "$base.log" >&2; exit 1; }
  rm -f "$base/etc/apt/sources.list"
  cp -a /etc/apt/sources.list* "$base/etc/apt/"
  grep -liE '^ *(Acquire|APT::Get)' /etc/apt/apt.conf.d/* |
    xargs -r cp -t "$base/etc/apt/apt.conf.d/"
  chroot "$base" useradd -m new
  touch "$base/.made"
fi

work=$(mktemp -d "$base.XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT
mapfile -t settings < <(python3 -m pip config debug |
  sed -nE 's/^ *(\/etc[^ ]+), exists: True$/\1/p')
pass=(HOME=/home/new LANG=C.UTF-8 TERM=dumb PATH=/usr/sbin:/usr/bin:/sbin:/bin)
while IFS= read -r each; do pass+=("$each"); done < \
  <(env | grep -E '^(PIP_[A-Z_]+|SSL_CERT_[A-Z]+|REQUESTS_CA_BUNDLE|[A-Za-z]+_(proxy|PROXY))=')
# Folders of packages that pip is told of.
mapfile -t folders < <(
  { cat /dev/null ${settings[@]+"${settings[@]}"}; echo "${PIP_FIND_LINKS:-}"; } |
  grep -oE '(file://)?/[^ ]+' | sed 's#^file://##' | sort -u)

export base work checkout clone
unshare --mount --pid --fork --kill-child bash -euc '
  root=$work/root
  mount --make-rprivate /
  mkdir "$work/over" "$root"
  mount -t tmpfs tmpfs "$work/over" -o size=12g
  mkdir "$work/over/up" "$work/over/work"
  mount -t overlay overlay "$root" \
    -o "lowerdir=$base,upperdir=$work/over/up,workdir=$work/over/work"
  mount -t proc proc "$root/proc"
  mount --rbind /dev "$root/dev"
  mount -t sysfs sysfs "$root/sys" || true
  cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
  mount --bind /etc/ssl/certs "$root/etc/ssl/certs"
  while [ "$1" != -- ]; do
    if [ -d "$1" ]; then mkdir -p "$root$1" && mount --bind "$1" "$root$1"; fi
    if [ -f "$1" ] && [ ! -e "$root$1" ]; then
      mkdir -p "$root$(dirname "$1")"
      cp "$1" "$root$1"
    fi
    shift
  done
  shift
  git clone -q "$checkout" "$root$clone"
  exec chroot "$root" env -i "$@"
' bare ${settings[@]+"${settings[@]}"} ${folders[@]+"${folders[@]}"} -- \
  "${pass[@]}" sh -c "cd $clone && exec \"\$@\"" sh "$@"
