#!/usr/bin/env bash
# Runs a command, as root, in a bare Debian 12 of its own, with a clone of this checkout in
# /root/kvplane and a copy of dist/ in it. What the command changes is gone afterwards.
#
#   tests/helpers/bare.sh COMMAND [ARG ...]
#
# Needs root and debootstrap. BARE_ROOT: where the untouched Debian is kept between calls (default
# /var/tmp/kvplane-bare). The machine's way to its package registries comes along: settings of pip
# and apt, certificates, proxies, and the folders that PIP_FIND_LINKS names.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# -gt 0 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
base=${BARE_ROOT:-/var/tmp/kvplane-bare}
if [ ! -e "$base/made" ]; then
  rm -rf "$base"
  debootstrap --variant=minbase --include=ca-certificates bookworm "$base" >"$base.log"
  rm -f "$base/etc/apt/sources.list"
  cp -a /etc/apt/{sources.list*,apt.conf.d} "$base/etc/apt/"
  for path in /etc/pip.conf /etc/xdg/pip ~/.config/pip; do
    [ ! -e "$path" ] || { mkdir -p "$base${path%/*}" && cp -aL "$path" "$base$path"; }
  done
  touch "$base/made"
fi
work=$(mktemp -d "$base.XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT
git clone --quiet . "$work/upper/root/kvplane"
[ ! -e dist ] || cp -r dist "$work/upper/root/kvplane/"
names='PIP_|SSL_CERT_|REQUESTS_CA_|https?_proxy|HTTPS?_PROXY|KVPLANE_'
settings=$(env | grep -E "^($names)" || true)
export base work settings
# It has this machine's network, for registries, and so its ports.
unshare --mount --pid --fork --kill-child bash -euc '
  mkdir -p "$work"/{below,root}
  mount -t overlay overlay -o "lowerdir=$base,upperdir=$work/upper,workdir=$work/below" "$work/root"
  mount -t proc proc "$work/root/proc"
  mount --rbind /dev "$work/root/dev"
  mount --rbind /sys "$work/root/sys"
  for path in /etc/resolv.conf /etc/hosts /etc/ssl/certs ${PIP_FIND_LINKS:-}; do
    [ -d "$path" ] && mkdir -p "$work/root$path" || touch "$work/root$path"
    mount --bind -o ro "$path" "$work/root$path"
  done
  mapfile -t settings <<<"$settings"
  exec chroot "$work/root" env -i -C /root/kvplane HOME=/root LANG=C.UTF-8 \
    PATH=/usr/sbin:/usr/bin:/sbin:/bin "${settings[@]}" "$@"
' bare "$@"
