"""The profile of an emulated fleet: one table that paces the workers and feeds the planner.

Rule with relative speeds: on a GPU type of speed v, one sequence's forward takes `block_forward_s *
scale / v` in a block, half of that in the head and a tenth in the embedding. A backward takes twice
its forward. TP degree t divides by t and adds 10%. Times grow linearly with the microbatch.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from autohet.runtime.job.emulation import EmulationSection
from planner.inputs.profile import Measurement, ProfileTable, read_profile

SHARE_BY_LAYER = {"embedding": 0.1, "block": 1.0, "head": 0.5}
BACKWARD_PER_FORWARD = 2.0
TP_OVERHEAD = 1.1
TP_DEGREES = (1, 2, 4, 8)


def emulated_profile(
    emulation: EmulationSection,
    *,
    model: str,
    dtypes: Sequence[str],
    sequence_length: int,
    max_microbatch_sequences: int,
) -> ProfileTable:
    """Return the seconds of every layer on every emulated GPU type, equal in all formats.

    Raises:
        ConfigError: `emulation.profile` cannot be read.
    """
    if emulation.profile is not None:
        return _scaled(read_profile(emulation.profile), emulation.scale)
    cases = itertools.product(
        dtypes,
        emulation.relative_speed_by_gpu_type.items(),
        TP_DEGREES,
        range(1, max_microbatch_sequences + 1),
        SHARE_BY_LAYER.items(),
    )
    measurements = []
    for dtype, (gpu_type, speed), tp_degree, microbatch, (layer, share) in cases:
        overhead = TP_OVERHEAD if tp_degree > 1 else 1.0
        block_s = emulation.block_forward_s * emulation.scale / speed / tp_degree * overhead
        forward_s = share * microbatch * block_s
        measurements.append(
            Measurement(
                model=model,
                gpu_type=gpu_type,
                dtype=dtype,
                tp_degree=tp_degree,
                sequence_length=sequence_length,
                microbatch_sequences=microbatch,
                layer=layer,
                forward_s=forward_s,
                backward_s=forward_s * BACKWARD_PER_FORWARD,
                source="emulated",
            )
        )
    return ProfileTable(measurements)


def _scaled(table: ProfileTable, scale: float) -> ProfileTable:
    rows: list[Measurement] = []
    for key in table.keys:
        for by_size in table.layers(key).values():
            for row in by_size.values():
                backward_s = None if row.backward_s is None else row.backward_s * scale
                update_s = None if row.update_s is None else row.update_s * scale
                forward_s = row.forward_s * scale
                scaled = replace(row, forward_s=forward_s, backward_s=backward_s, update_s=update_s)
                rows.append(scaled)
    return ProfileTable(rows)
