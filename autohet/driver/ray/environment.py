"""Environment variables of this process that workers and agents need too."""

import os

FORWARDED = ("AWS_", "HF_", "AUTOHET_CACHE", "NCCL_", "TORCH_", "GLOO_", "CUDA_", "PYTORCH_")
NODE_OWN = ("AWS_EC2_METADATA_", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "NCCL_HOSTID")
"""Variables that are each machine's or process's own."""


class Environment(dict[str, str]):
    """Environment variables by name; values may be secrets and are not shown."""

    def __repr__(self) -> str:
        return f"Environment of {', '.join(sorted(self))}"


def forwarded_environment() -> Environment:
    """Return the environment variables that workers on other machines need too.

    They name storage, models and caches, and set options of CUDA, NCCL, gloo and PyTorch. A
    variable of a worker's own environment takes precedence.
    """
    forwarded = Environment()
    for name, value in os.environ.items():
        if name.startswith(FORWARDED) and not name.startswith(NODE_OWN):
            forwarded[name] = value
    return forwarded
