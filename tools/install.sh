#!/bin/sh
# Everything into .venv, in the versions of constraints.txt: `make install` and each target that needs it.
#   tools/install.sh PYTHON GROUPS     as in: tools/install.sh python3 notebooks,figures,tests
# A second call does nothing, unless the versions, the groups or this folder have changed.
set -eu
cd "$(dirname "$0")/.."
python=$1 groups=$2 venv=.venv/bin/python stamp=.venv/.installed
unset PYTHONPATH PYTHONHOME
wanted="$groups $PWD $(cat pyproject.toml constraints.txt | cksum)"
if test -x $venv && test -f $stamp && test "$(cat $stamp)" = "$wanted"; then exit 0; fi

test -x $venv && python=$venv
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  found=$("$python" --version 2>&1 | tail -n 1)
  echo "Python 3.11 or newer is needed; $python is: $found." \
    "Name one: make PYTHON=python3.12 (and remove .venv if an older one made it)." >&2
  exit 1
fi
if ! test -x $venv; then
  echo "Making .venv ..."
  "$python" -m venv .venv || { rm -rf .venv; echo "No .venv could be made; the lines above say why." >&2; exit 1; }
fi
echo "Installing the package and the versions of constraints.txt into .venv ... (minutes, the first time)"
rm -f $stamp
$venv -m pip install -qq -e ".[$groups]" -c constraints.txt
printf '%s' "$wanted" > $stamp
