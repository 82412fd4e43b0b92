"""Work of Muon's update (Jordan et al. 2024): a Newton-Schulz iteration of each hidden matrix."""

from dataclasses import dataclass

ITERATIONS = 5
"""Iterations of an update, as in `torch.optim.Muon`."""
MUON_STATE_BYTES = 8
"""Bytes of master and momentum of a scalar."""
WORKSPACE_BYTES = 14
"""Bytes of a scalar while its matrix is updated: gradient and update in fp32, three in bf16."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """Matrices of a layer that Muon updates: their scalars, those of the largest, and FLOPs."""

    parameters: int
    largest: int
    flops: float


def orthogonalization_flops(rows: int, columns: int) -> float:
    """Return the FLOPs that orthogonalize one matrix.

    With n <= m the matrix's sizes, an iteration has three products: X X^T (2 n^2 m), its square
    (2 n^3) and that times X (2 n^2 m).
    """
    shorter = min(rows, columns)
    longer = max(rows, columns)
    return ITERATIONS * 2.0 * shorter * shorter * (2 * longer + shorter)
