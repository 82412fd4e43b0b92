#!/usr/bin/env bash
# Makes ~/autohet-env on a node: one Python patch version everywhere, torch's CUDA 13.0 wheels and everything else pinned by version and hash
# (cluster_configs/requirements.lock, written by scripts/lock). autohet itself is what is synced to this directory (editable), so that newer
# sources need no installation.
# Does nothing where the image was baked with the same pins (scripts/aws/bake): a spot node is then up in a minute or two.
set -euo pipefail
PYTHON_VERSION=3.11.7
# uv 0.13.9 as PyPI serves it; it checks the Python that it fetches by hashes of its own.
UV_WHEEL=https://files.pythonhosted.org/packages/3d/aa/26d64642d808de4a652579ef950d7cd2d37f080a8babf9c67c6b75fc4c3f/uv-0.13.9-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl
UV_SHA256=d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19
MINIMUM_DRIVER=580.65.06   # what CUDA 13.0 needs
source_tree=$(cd "$(dirname "$0")/../.." && pwd)
environment=$HOME/autohet-env
want=$(cd "$source_tree" && cat cluster_configs/requirements.lock pyproject.toml cluster_configs/aws/setup.sh | sha256sum | cut -d' ' -f1)

if command -v nvidia-smi > /dev/null && nvidia-smi -L 2> /dev/null | grep -q GPU; then
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1)
    if [ "$(printf '%s\n%s\n' "$MINIMUM_DRIVER" "$driver" | sort -V | head -1)" != "$MINIMUM_DRIVER" ]; then
        echo "autohet: the NVIDIA driver here is $driver, but torch's CUDA 13.0 build needs $MINIMUM_DRIVER or newer; use a newer image" >&2
        exit 1
    fi
fi

if ! grep -q autohet-env ~/.bashrc 2> /dev/null; then   # in front: Ubuntu's own file ends early in a shell without a terminal
    { echo 'export PATH="$HOME/autohet-env/bin:$PATH" RAY_AUTH_MODE=token'; cat ~/.bashrc 2> /dev/null || true; } > ~/.bashrc.new
    mv ~/.bashrc.new ~/.bashrc
fi
if [ "$(cat "$environment/.autohet-pins" 2> /dev/null)" = "$want" ]; then
    echo "autohet: this image was baked with the same pins; nothing to install"
    exit 0
fi
if ! command -v ~/.local/bin/uv > /dev/null; then
    fetched=$(mktemp -d)
    curl --proto '=https' -fsSL -o "$fetched/uv.whl" "$UV_WHEEL"
    echo "$UV_SHA256  $fetched/uv.whl" | sha256sum --check --quiet
    python3 -m zipfile -e "$fetched/uv.whl" "$fetched"
    mkdir -p ~/.local/bin
    install -m 755 "$fetched"/uv-*.data/scripts/uv ~/.local/bin/uv
    rm -r "$fetched"
fi
~/.local/bin/uv venv --clear --python "$PYTHON_VERSION" "$environment"
~/.local/bin/uv pip install -q --python "$environment/bin/python" --require-hashes -r "$source_tree/cluster_configs/requirements.lock"
~/.local/bin/uv pip install -q --python "$environment/bin/python" --no-deps --no-build-isolation -e "$source_tree"
echo "$want" > "$environment/.autohet-pins"
