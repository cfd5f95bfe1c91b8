#!/usr/bin/env bash
# Clone to trained model in one command: launch/local.sh [key=value ...]; --help explains.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
case "${1:-}" in
  -h | --help) exec "${INVDIST_PYTHON:-python3}" -m invdist local --help ;; # before anything is installed
esac
EXTRA=
. "$ROOT/launch/_setup.sh"
# exec: signals reach the one process that knows what to end.
exec "$PYTHON" -m invdist local "$@"
