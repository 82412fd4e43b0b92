"""What of this process's environment workers and agents need too."""

import os

FORWARDED = ("AWS_", "HF_", "AUTOHET_CACHE", "NCCL_", "TORCH_", "GLOO_", "CUDA_", "PYTORCH_")
NODE_OWN = (
    "AWS_EC2_METADATA_",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "NCCL_HOSTID",
)  # each machine's or process's own


class Environment(dict[str, str]):
    """Variables by name. Values may be secrets, and are not shown."""

    def __repr__(self) -> str:
        return f"Environment of {', '.join(sorted(self))}"


def forwarded_environment() -> Environment:
    """Where this process finds its storage, models and caches, and what it was told of CUDA, NCCL,
    gloo and PyTorch: workers on other machines need the same, unless their own environment says
    otherwise.
    """
    wanted = {
        n: v
        for n, v in os.environ.items()
        if n.startswith(FORWARDED) and not n.startswith(NODE_OWN)
    }
    return Environment(wanted)
