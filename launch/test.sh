#!/usr/bin/env bash
# Lint, types and tests: launch/test.sh [pytest arguments]. Installs what it needs into .venv first.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case "${1:-}" in
  -h | --help)
    sed -n '2s/^# //p' "${BASH_SOURCE[0]}"
    echo "INVDIST_DATA names the folder with the real data sets; without it, tests that need them are skipped."
    echo "-m 'slow or not slow' adds the slow tests, which start and kill groups of processes."
    exit 0
    ;;
esac
EXTRA=dev
. "$ROOT/launch/_setup.sh"
cd "$ROOT"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m pyright --pythonpath "$PYTHON"
# Two at a time: many tests wait for processes that start. More than two would compete with those that have ranks.
"$PYTHON" -m pytest -n 2 --dist loadscope --no-loadscope-reorder "$@"
