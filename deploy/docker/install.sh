#!/bin/sh
# Installs Pilotfish for use, and nothing for tests, into a new virtual environment.
#   install.sh cpu|cuda FOLDER        from the root of the sources
# Used by both images and by `make test-image`. Versions are those of constraints.txt. torch is installed from PyTorch's
# own index, as a build for CPUs or CUDA, or from TORCH_INDEX; if that is empty, from pip's configured index.
set -eu

case "$1" in
    cpu) torch_index="${TORCH_INDEX-https://download.pytorch.org/whl/cpu}" extras="[kv-events]" ;;
    cuda) torch_index="${TORCH_INDEX-https://download.pytorch.org/whl/cu130}" extras="[kv-events]" ;;
    *)
        echo "install.sh: '$1' is neither cpu nor cuda" >&2
        exit 2
        ;;
esac
folder="$2"
python="$folder/bin/python"

python3 -m venv "$folder"
pip_install() {
    "$python" -m pip install --quiet --no-cache-dir --disable-pip-version-check \
        --constraint deploy/docker/constraints.txt ${torch_index:+--extra-index-url "$torch_index"} "$@"
}
pip_install torch
pip_install ".$extras"
"$python" -m pip check
"$folder/bin/pilotfish" version
