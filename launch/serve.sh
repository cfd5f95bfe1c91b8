#!/usr/bin/env bash
# Serves a run over HTTP: launch/serve.sh [--run RUN] [...]; without --run the newest of ./runs, trained first if there is none.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
case "${1:-}" in
  -h | --help) exec "${INVDIST_PYTHON:-python3}" -m invdist serve --help ;; # before anything is installed
esac
EXTRA=
. "$ROOT/launch/_setup.sh"
case " $* " in
  *" --run "* | *" --run="*) exec "$PYTHON" -m invdist serve "$@" ;;
esac
newest() { ls -dt runs/*/checkpoints/step-* 2>/dev/null | head -n 1; }
if [ -z "$(newest)" ]; then "$PYTHON" -m invdist local --no-compare; fi
RUN=$(dirname "$(dirname "$(newest)")")
# exec: signals must reach the process that ends the others.
exec "$PYTHON" -m invdist serve --run "$RUN" "$@"
