"""Order in which the stages of a pipeline run their forwards and backwards: the only definition.

Source: 1F1B; PipeDream-Flush, Narayanan et al., "Memory-efficient pipeline-parallel DNN training",
2021, section 2.2. The runtime runs this order (`autohet.runtime.parallel.schedule`) and the planner
simulates it (`planner.cost.schedule`), so a plan is priced as it runs.
"""

from collections.abc import Sequence

import numpy as np

from planner.arrays import Ints


def stage_order(in_flight: Sequence[int], stage: int, num_microbatches: int) -> list[int]:
    """Return the microbatches of one stage in the order of its actions, [2 K].

    m marks the forward of microbatch m, ~m its backward.
    """
    forward, backward = action_slots(in_flight, num_microbatches)
    slots = np.concatenate([forward[stage], backward[stage]])
    microbatch = np.arange(num_microbatches)
    actions = np.concatenate([microbatch, ~microbatch])
    ordered: list[int] = actions[np.argsort(slots)].tolist()
    return ordered


def action_slots(in_flight: Sequence[int], num_microbatches: int) -> tuple[Ints, Ints]:
    """Return the slots of all forwards and of all backwards, each [P, K].

    An action takes one slot of a lockstep of all stages, after the actions whose results it needs.
    Stage s of P keeps n_s = in_flight[s] microbatches. It goes forward in slots s, s + 1, ... until
    n_s are in flight. All stages have done so by slot W. Stage s then goes backward in slots
    W + P - 1 - s, W + P + 1 - s, ... and forward between.
    """
    depth = len(in_flight)
    most = np.array(in_flight)[:, None]
    stage = np.arange(depth)[:, None]
    microbatch = np.arange(num_microbatches)[None, :]

    warm_up_end = int((stage + most).max())
    first_backward = warm_up_end + depth - 1 - stage
    warm_up = stage + microbatch
    between_backwards = first_backward + 1 + 2 * (microbatch - most)
    forward = np.where(microbatch < most, warm_up, between_backwards)
    backward = first_backward + 2 * microbatch
    return forward, backward
