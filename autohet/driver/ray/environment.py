"""What of this process's environment workers and agents need too."""

import os

FORWARDED = ("AWS_", "HF_", "AUTOHET_CACHE", "NCCL_", "TORCH_", "GLOO_", "CUDA_", "PYTORCH_")
NODE_OWN = ("AWS_EC2_METADATA_", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "NCCL_HOSTID")  # each machine's or process's own


def forwarded_environment() -> dict[str, str]:
    """Where this process finds its storage, models and caches, and what it was told of CUDA, NCCL, gloo and PyTorch: workers on other
    machines need the same, unless their own environment says otherwise.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(FORWARDED) and not name.startswith(NODE_OWN)
    }
