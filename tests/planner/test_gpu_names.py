"""GPU types by the names that NVML and PyTorch give cards of ten years (2016 to 2026)."""

from collections import defaultdict

import pytest

from planner.inputs.catalogue import find_gpu_type
from planner.inputs.gpu_names import identify_gpu

CARDS = [  # name, GiB that PyTorch reports, multiprocessors, type
    ("Tesla P100-SXM2-16GB", 15.9, 56, "P100"),
    ("Tesla P100-PCIE-16GB", 15.9, 56, "P100"),
    ("Tesla P100-PCIE-12GB", 11.9, 56, "P100-12"),
    ("Tesla P40", 22.4, 30, "P40"),
    ("Tesla P4", 7.4, 20, "P4"),
    ("Tesla V100-SXM2-16GB", 15.8, 80, "V100-16"),
    ("Tesla V100-SXM2-32GB", 31.7, 80, "V100-32"),
    ("Tesla V100-SXM3-32GB", 31.7, 80, "V100-32"),
    ("Tesla V100-DGXS-32GB", 31.7, 80, "V100-32"),
    ("Tesla V100-PCIE-16GB", 15.8, 80, "V100-16-PCIe"),
    ("Tesla V100-PCIE-32GB", 31.7, 80, "V100-32-PCIe"),
    ("Tesla V100-FHHL-16GB", 15.8, 80, "V100-16-FHHL"),
    ("Tesla V100S-PCIE-32GB", 31.7, 80, "V100S-32"),
    ("Tesla T4", 14.6, 40, "T4"),
    ("NVIDIA T4G", 14.6, 40, "T4"),
    ("NVIDIA A2", 14.6, 10, "A2"),
    ("NVIDIA A10", 22.1, 72, "A10"),
    ("NVIDIA A10G", 22.1, 80, "A10G"),
    ("NVIDIA A16", 14.6, 10, "A16"),
    ("NVIDIA A30", 23.6, 56, "A30"),
    ("NVIDIA A40", 44.6, 84, "A40"),
    ("A100-SXM4-40GB", 39.4, 108, "A100-40"),
    ("NVIDIA A100-SXM4-40GB", 39.4, 108, "A100-40"),
    ("NVIDIA A100-PCIE-40GB", 39.4, 108, "A100-40"),
    ("NVIDIA A100-SXM4-80GB", 79.2, 108, "A100-80"),
    ("NVIDIA A100 80GB PCIe", 79.2, 108, "A100-80"),
    ("NVIDIA A100X", 79.2, 108, "A100-80"),
    ("NVIDIA A800-SXM4-80GB", 79.2, 108, "A800-80"),
    ("NVIDIA A800 80GB PCIe", 79.2, 108, "A800-80"),
    ("NVIDIA L4", 22.0, 58, "L4"),
    ("NVIDIA L20", 44.6, 92, "L20"),
    ("NVIDIA L40", 44.4, 142, "L40"),
    ("NVIDIA L40S", 44.4, 142, "L40S"),
    ("NVIDIA H100 80GB HBM3", 79.1, 132, "H100-80"),
    ("NVIDIA H100 64GB HBM2", 63.4, 132, "H100-64"),
    ("NVIDIA H100 PCIe", 79.1, 114, "H100-PCIe"),
    ("NVIDIA H100 NVL", 93.1, 132, "H100-NVL"),
    ("NVIDIA H800", 79.1, 132, "H800"),
    ("NVIDIA H20", 95.6, 78, "H20"),
    ("NVIDIA GH200 480GB", 94.5, 132, "GH-96"),
    ("NVIDIA GH200 120GB", 94.5, 132, "GH-96"),
    ("NVIDIA GH200 144G HBM3e", 142.0, 132, "GH-144"),
    ("NVIDIA H200", 139.8, 132, "H200"),
    ("NVIDIA H200 NVL", 139.8, 132, "H200-NVL"),
    ("NVIDIA B200", 178.4, 148, "B200"),
    ("NVIDIA GB200", 184.3, 152, "GB200"),
    ("NVIDIA B300 SXM6 AC", 267.7, 148, "B300"),
    ("NVIDIA GB300", 276.6, 152, "GB300"),
    ("NVIDIA GB10", 119.7, 48, "GB10"),
    ("NVIDIA TITAN X (Pascal)", 11.9, 28, "TITAN-X-Pascal"),
    ("TITAN Xp", 11.9, 30, "TITAN-Xp"),
    ("TITAN V", 11.8, 80, "TITAN-V"),
    ("NVIDIA TITAN RTX", 23.6, 72, "TITAN-RTX"),
    ("GeForce GTX 1060 6GB", 5.9, 10, "GTX-1060-6GB"),
    ("NVIDIA GeForce GTX 1060 3GB", 2.9, 9, "GTX-1060-3GB"),
    ("GeForce GTX 1080 Ti", 10.9, 28, "GTX-1080-Ti"),
    ("NVIDIA GeForce GTX 1660 SUPER", 5.8, 22, "GTX-1660-SUPER"),
    ("GeForce RTX 2080", 7.8, 46, "RTX-2080"),
    ("GeForce RTX 2080 Ti", 10.8, 68, "RTX-2080-Ti"),
    ("NVIDIA GeForce RTX 2080 SUPER", 7.8, 48, "RTX-2080-SUPER"),
    ("NVIDIA GeForce RTX 3060", 11.8, 28, "RTX-3060"),
    ("NVIDIA GeForce RTX 3060", 7.8, 28, "RTX-3060-8"),
    ("NVIDIA GeForce RTX 3060 Ti", 7.8, 38, "RTX-3060-Ti"),
    ("NVIDIA GeForce RTX 3080", 9.8, 68, "RTX-3080"),
    ("NVIDIA GeForce RTX 3080 Laptop GPU", 15.7, 48, "RTX-3080-Laptop"),
    ("NVIDIA GeForce RTX 3090", 23.7, 82, "RTX-3090"),
    ("NVIDIA GeForce RTX 3090 Ti", 23.7, 84, "RTX-3090-Ti"),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", 15.7, 66, "RTX-4070-Ti-SUPER"),
    ("NVIDIA GeForce RTX 4090", 23.6, 128, "RTX-4090"),
    ("NVIDIA GeForce RTX 4090 D", 23.6, 114, "RTX-4090-D"),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, 76, "RTX-4090-Laptop"),
    ("NVIDIA GeForce RTX 5090", 31.4, 170, "RTX-5090"),
    ("Quadro P6000", 23.9, 30, "Quadro-P6000"),
    ("Quadro GV100", 31.7, 80, "Quadro-GV100"),
    ("Quadro RTX 6000", 23.6, 72, "Quadro-RTX-6000"),
    ("Quadro RTX 8000", 47.5, 72, "Quadro-RTX-8000"),
    ("NVIDIA RTX A4000", 15.7, 48, "A4000"),
    ("NVIDIA RTX A5000", 23.6, 64, "RTX-A5000"),
    ("NVIDIA RTX A6000", 47.5, 84, "A6000"),
    ("NVIDIA RTX 6000 Ada Generation", 47.5, 142, "RTX-6000-Ada"),
    ("NVIDIA RTX 5000 Ada Generation", 31.5, 100, "RTX-5000-Ada"),
    (
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        94.9,
        188,
        "RTX-PRO-6000-Blackwell-Server",
    ),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.6, 16, "H100-80-MIG-1g.10gb"),
    ("NVIDIA H100 NVL MIG 1g.12gb", 10.8, 16, "H100-NVL-MIG-1g.12gb"),
    ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 19.5, 42, "A100-40-MIG-3g.20gb"),
    ("NVIDIA A100-SXM4-80GB MIG 1g.10gb+me", 9.5, 14, "A100-80-MIG-1g.10gb+me"),
    ("NVIDIA A100-SXM4-80GB MIG 1c.2g.20gb", 19.5, 14, "A100-80-MIG-1c.2g.20gb"),
    ("NVIDIA A30 MIG 2g.12gb", 11.7, 28, "A30-MIG-2g.12gb"),
    ("NVIDIA H100 80GB HBM3", 79.1, 66, "H100-80-66SM"),
    ("GRID T4-16Q", 15.0, 40, "T4-16Q"),
]


@pytest.mark.parametrize(("name", "gib", "multiprocessors", "expected"), CARDS)
def test_a_card_has_its_type(name: str, gib: float, multiprocessors: int, expected: str) -> None:
    assert identify_gpu(name, int(gib * 2**30), multiprocessors) == expected
    assert identify_gpu(name.upper(), int(gib * 2**30), multiprocessors).upper() == expected.upper()


def test_cards_of_different_speed_never_share_a_type() -> None:
    """Wrong: "NVIDIA GeForce RTX 4090" is of type GeForce, a slice the whole card."""
    processors = defaultdict(set)
    for name, gib, multiprocessors, _ in CARDS:
        processors[identify_gpu(name, int(gib * 2**30), multiprocessors)].add(multiprocessors)
    assert {kind: found for kind, found in processors.items() if len(found) > 1} == {}


def test_an_unknown_card_is_no_card_of_the_catalogue() -> None:
    name = identify_gpu("NVIDIA GeForce RTX 7090", 40 << 30, 200)
    assert name == "RTX-7090"
    assert find_gpu_type(name) is None
    assert identify_gpu("Graphics Device", 8 << 30, 20) == "Graphics-Device"
