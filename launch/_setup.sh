#!/usr/bin/env bash
# Makes the environment of the launch scripts; sourced, with ROOT set. `EXTRA=dev` adds the development tools.
# Afterwards PYTHON is the interpreter. A second run installs nothing.
#
#   INVDIST_PYTHON   the Python (>= 3.11) that makes the environment
#   INVDIST_VENV     the environment to use instead of ROOT/.venv; an existing one is used as it is
#
# torch is installed first and with its exact version: a looser request downloads gigabytes of CUDA. Without a GPU,
# TorchRec is installed without its dependencies, because it would install fbgemm-gpu beside fbgemm-gpu-cpu.
# If the package index has no CPU wheels of torch, PIP_EXTRA_INDEX_URL adds another one (docs/install.md).

invdist_find_python() {
  local candidate
  for candidate in ${INVDIST_PYTHON:-python3 python3.11 python3.12 python3.13 python}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "error: no Python 3.11 or newer with venv found; set INVDIST_PYTHON to one" >&2
  return 1
}

invdist_pip() {
  local log
  log=$(mktemp)
  if ! "$PYTHON" -m pip install --quiet --no-input --no-compile --disable-pip-version-check "$@" >"$log" 2>&1; then
    echo "error: pip install $* failed:" >&2
    cat "$log" >&2
    rm -f "$log"
    return 1
  fi
  rm -f "$log"
}

invdist_install() {
  local kind=cpu
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then kind=gpu; fi
  echo "installing the $kind stack into $VENV (minutes the first time, nothing later)"
  if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
    local base
    base=$(invdist_find_python) || return 1
    "$base" -m venv "$VENV" || return 1
  fi
  invdist_pip "torch==2.13.0" || return 1
  if [ "$kind" = gpu ]; then
    invdist_pip --editable "$ROOT[gpu${EXTRA:+,$EXTRA}]" || return 1
  else
    invdist_pip --editable "$ROOT[cpu${EXTRA:+,$EXTRA}]" || return 1
    invdist_pip --no-deps "torchrec==1.8.0" || return 1
  fi
  # Here and not by pip, which compiles on one core. Some packages have files that do not compile: never an error.
  "$PYTHON" -m compileall -q -j 0 "$VENV"/lib*/python3*/site-packages >/dev/null 2>&1 || true
}

invdist_setup() {
  VENV=${INVDIST_VENV:-$ROOT/.venv}
  PYTHON=$VENV/bin/python
  if [ -n "${INVDIST_VENV:-}" ] && [ -x "$PYTHON" ]; then return 0; fi
  mkdir -p "$VENV" || return 1
  local wanted stamp=$VENV/invdist-${EXTRA:-run}.stamp fuller=$VENV/invdist-dev.stamp
  wanted=$(cat "$ROOT/pyproject.toml" "$ROOT/launch/_setup.sh" | cksum) || return 1
  (
    # One install at a time. The stamp is written last, so an interrupted install is repeated.
    if command -v flock >/dev/null; then flock 9; fi
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] && [ "$(cat "$fuller" 2>/dev/null)" != "$wanted" ]; then
      rm -f "$stamp"
      invdist_install || exit 1
      echo "$wanted" >"$stamp"
    fi
  ) 9>"$VENV/invdist.lock"
}

invdist_setup || exit 1
# For tools and Ray workers that look the interpreter up by name.
export PATH="$VENV/bin:$PATH" PYTHONUNBUFFERED=1
