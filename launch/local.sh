#!/usr/bin/env bash
# Clone to trained model in one command: launch/local.sh [key=value ...]; --help explains.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
EXTRA=
. "$ROOT/launch/_setup.sh"
# exec: signals reach the one process that knows what to end.
PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m invdist.local "$@"
