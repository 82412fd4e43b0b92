"""Who sends hidden states to whom over a boundary between two stages. The cost model and the runtime both follow it.

Hidden states are whole on every rank of a stage. Inside a node rank j of t2 takes them whole from rank j * t1 // t2 of t1. From
node to node that would be t2 times the same bytes through one NIC: there each rank takes one of t2 equal slices, and its group
gathers them inside its node (Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
2021, section 4.1).
"""

from dataclasses import dataclass
from functools import lru_cache

from planner.plan import Stage


@dataclass(frozen=True, slots=True)
class Transfer:
    """`target` takes slice `index` of `slices` from `source`; one slice: the whole."""

    source: str
    target: str
    index: int
    slices: int


@lru_cache(maxsize=256)  # executors ask for every microbatch; the planner remembers what it makes of them
def transfers_between(sender: Stage, receiver: Stage) -> tuple[Transfer, ...]:
    """One transfer for each rank of the receiver, in order of ranks. The same for gradients, with the stages exchanged."""
    slices = receiver.tp_degree if _apart(sender, receiver) else 1
    return tuple(
        Transfer(sender.workers[j * sender.tp_degree // receiver.tp_degree], target, j if slices > 1 else 0, slices)
        for j, target in enumerate(receiver.workers)
    )


def _apart(sender: Stage, receiver: Stage) -> bool:
    """Whether the receiver's group lies on one node, and the sender's nowhere on it."""
    nodes = {_node(worker) for worker in receiver.workers}
    return len(nodes) == 1 and not any(_node(worker) in nodes for worker in sender.workers)


def _node(worker: str) -> str:
    return worker.rpartition("/")[0]
