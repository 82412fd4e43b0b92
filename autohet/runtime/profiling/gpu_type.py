"""GPU type of this machine; its own module, since a driver that asks for it imports no model."""

import torch

from planner.inputs.gpu_names import identify_gpu


def device_gpu_type(device_type: str) -> str:
    """Return the catalogue's name of this machine's first GPU, or CPU.

    "NVIDIA A100-SXM4-40GB" is A100-40.
    """
    if device_type != "cuda":
        return "CPU"
    facts = torch.cuda.get_device_properties(0)
    return identify_gpu(facts.name, facts.total_memory, facts.multi_processor_count)
