#!/usr/bin/env bash
# Installs what is needed and trains a first model: launch/local.sh [key=value ...]; see --help.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
case "${1:-}" in
  -h | --help) exec "${INVDIST_PYTHON:-python3}" -m invdist local --help ;; # before anything is installed
esac
EXTRA=
. "$ROOT/launch/_setup.sh"
# exec: signals must reach the process that ends the others.
exec "$PYTHON" -m invdist local "$@"
