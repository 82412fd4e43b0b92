#!/usr/bin/env bash
# Makes ~/autohet-env on a node: one Python patch version everywhere, torch's CUDA 13.0 wheels and everything else pinned. autohet itself is
# what is synced to this directory (editable), so that newer sources need no installation.
# Does nothing where the image was baked with the same pins (scripts/aws/bake): a spot node is then up in a minute or two.
set -euo pipefail
PYTHON_VERSION=3.11.7
UV_VERSION=0.13.9
MINIMUM_DRIVER=580.65.06   # what CUDA 13.0 needs
source_tree=$(cd "$(dirname "$0")/../.." && pwd)
environment=$HOME/autohet-env
want=$(cd "$source_tree" && cat constraints.txt constraints-cuda.txt pyproject.toml cluster_configs/aws/setup.sh | sha256sum | cut -d' ' -f1)

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
command -v ~/.local/bin/uv > /dev/null || curl --proto '=https' -LsSf "https://astral.sh/uv/$UV_VERSION/install.sh" | sh
~/.local/bin/uv venv --clear --python "$PYTHON_VERSION" "$environment"
~/.local/bin/uv pip install -q --python "$environment/bin/python" -c "$source_tree/constraints-cuda.txt" -c "$source_tree/constraints.txt" -e "$source_tree"
echo "$want" > "$environment/.autohet-pins"
