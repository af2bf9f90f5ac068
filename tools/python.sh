#!/bin/sh
# The Python of .venv, for the Makefile. Jupyter wants a home folder that it can write; build/home stands in for one.
if ! { test -n "${HOME:-}" && test -d "$HOME" && test -w "$HOME"; }; then
  mkdir -p build/home
  export HOME="$PWD/build/home"
  echo "There is no home folder that can be written: build/home takes its place." >&2
fi
exec .venv/bin/python "$@"
