#!/usr/bin/env bash
# Makes a virtual environment for each peer whose own loss and advantages the presets are checked against.
# `make peers` runs it, and then the tests; extra arguments go to pip.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment() { # name, requirements
  local folder=build/peers/$1
  shift
  if [[ ! -e "$folder/.installed" ]]; then
    "${PYTHON:-python3}" -m venv --clear "$folder"
    "$folder/bin/pip" install --quiet --retries 0 "${pip_arguments[@]}" "$@"
    touch "$folder/.installed"
  fi
}

pip_arguments=("$@")
environment trl torch==2.13.0 transformers==5.24.0 trl==1.16.0
environment verl torch==2.13.0 "transformers<5.11" verl==0.9.1
