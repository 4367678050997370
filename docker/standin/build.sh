#!/usr/bin/env bash
# Make a stand-in for NVIDIA's image: a small Linux with Python, and test programs in the places of NVIDIA's tools.
#
#   docker/standin/build.sh ENGINE IMAGE [RELEASE]
#
# ENGINE   docker or podman.
# IMAGE    Name to give it; NVIDIA's own name will do, nothing is fetched or pushed.
# RELEASE  TensorRT-LLM release whose flags the tools know (default 1.2.1).
#
# Everything comes from Debian packages, so no image registry is needed. About 10 s the first time, 2 s from then on.
# Unpacked packages are kept in STANDIN_CACHE (default ~/.cache/trtllm-pipeline/standin).
# Exit 75: something that is needed is missing; its name is printed.
set -euo pipefail
engine=${1:?usage: build.sh ENGINE IMAGE [RELEASE]}; image=${2:?usage: build.sh ENGINE IMAGE [RELEASE]}; release=${3:-1.2.1}
here=$(cd "$(dirname "$0")" && pwd)
for needed in "$engine" apt-get dpkg-deb tar python3 flock; do
  command -v "$needed" >/dev/null || { echo "standin: needs $needed" >&2; exit 75; }
done

packages=(bash coreutils dash debianutils findutils grep procps python3 sed base-passwd usr-is-merged)
cache=${STANDIN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/trtllm-pipeline/standin}
base=$cache/$(printf '%s\n' "$(cat /etc/debian_version)" "${packages[@]}" | sha256sum | cut -c1-12)

unpack() {
  rm -rf "$base" "$base.debs"; mkdir -p "$base" "$base.debs/partial"; : >"$base.debs/status"
  # With an empty list of installed packages apt finds everything that the wanted ones need.
  apt-get -qq -o Dir::State::status="$base.debs/status" -o Dir::Cache::archives="$base.debs" -o Debug::NoLocking=1 \
    -o APT::Sandbox::User="$(id -un)" --no-install-recommends --download-only --yes install "${packages[@]}" \
    >"$base.debs/log" 2>&1 ||
    { cat "$base.debs/log" >&2; echo "standin: needs packages from a Debian mirror (apt-get update?)" >&2; exit 75; }
  for package in "$base.debs"/*.deb; do dpkg-deb --extract "$package" "$base"; done
  rm -rf "$base.debs" "$base"/usr/share/{doc,man,locale,info,lintian,bash-completion,perl}
  # What the packages' scripts would have made.
  [ -e "$base/bin/sh" ] || ln -s dash "$base/bin/sh"
  mkdir -p "$base"/{dev,proc,sys,run,root,mnt,var/tmp}; mkdir -p -m 1777 "$base/tmp"; chmod 1777 "$base/tmp"
  cp "$base/usr/share/base-passwd/passwd.master" "$base/etc/passwd"
  cp "$base/usr/share/base-passwd/group.master" "$base/etc/group"
  : >"$base.complete"
}

mkdir -p "$cache"
exec 9>"$cache/lock"; flock 9
[ -e "$base.complete" ] || unpack
flock -u 9

# Links, not copies: a tree of its own in no time.
root=$(mktemp -d -p "$cache"); trap 'rm -rf "$root"' EXIT
cp -al "$base/." "$root"; chmod 755 "$root"
python3 "$here/overlay.py" "$release" "$root"
tar -C "$root" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -c . |
  "$engine" import --change 'ENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin' --change 'ENV LANG=C.UTF-8' \
    --change "LABEL stand-in=$release" --change 'CMD ["/bin/bash"]' - "$image" >/dev/null
