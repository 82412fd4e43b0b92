"""Device of a worker's process."""

import torch

from planner.errors import ConfigError


def choose_device(wish: str, precision: str, given: str | None = None) -> torch.device:
    """Return the device of this process: its one GPU, if it has one.

    given: the GPU type that the plan expects here.

    Raises:
        ConfigError: this machine lacks the device that the job asks for, or the GPU is unusable; it
        is never replaced by the CPU.
    """
    # First, since the check for CUDA starts its driver in this process.
    if wish == "cpu":
        return torch.device("cpu")
    has_cuda = torch.cuda.is_available()
    if wish == "auto" and not has_cuda:
        if given is not None:
            raise ConfigError(
                f"this worker was given a GPU ({given}), but PyTorch finds no CUDA device; fix the"
                " node's driver or its CUDA build of PyTorch, or set training.device to cpu"
            )
        return torch.device("cpu")
    if not has_cuda:
        raise ConfigError(
            "training.device is cuda, but PyTorch finds no CUDA device; set training.device to auto"
            " or cpu, or fix the node's driver or its CUDA build of PyTorch"
        )
    # GPUs before Ampere (compute capability 8.0) only emulate bf16.
    if precision == "bf16" and torch.cuda.get_device_capability(0) < (8, 0):
        raise ConfigError(
            f"training.precision is bf16, which {torch.cuda.get_device_name(0)} cannot compute; set"
            " training.precision to fp32, or parallelism.compute_formats to auto"
        )
    return torch.device("cuda", 0)
