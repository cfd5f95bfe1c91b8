#!/usr/bin/env bash
# Lint, types and tests: launch/test.sh [pytest arguments]. Installs what it needs into .venv first.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case "${1:-}" in
  -h | --help)
    sed -n '2s/^# //p' "${BASH_SOURCE[0]}"
    echo "Real data sets are looked for in INVDIST_DATA; tests that need them are skipped without."
    echo "-m 'slow or not slow' adds the few that start and kill whole groups of processes."
    exit 0
    ;;
esac
EXTRA=dev
. "$ROOT/launch/_setup.sh"
cd "$ROOT"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m pyright --pythonpath "$PYTHON"
"$PYTHON" -m pytest "$@"
