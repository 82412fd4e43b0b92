"""Seconds of a layer by microbatch size, through measured points or from a single one."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planner.arrays import Floats
from planner.cost.parameters import CostParameters


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by microbatch: increasing `microbatches`, non-decreasing `seconds`."""

    microbatches: Floats
    seconds: Floats

    def at(self, microbatch: int) -> float:
        """Return seconds at a microbatch size: piecewise linear between the points.

        Outside the points: the straight line through the nearer half of them, never negative.
        """
        x = self.microbatches
        y = self.seconds
        if len(x) == 1:
            return float(y[0] * microbatch / x[0])
        if microbatch > x[-1]:
            # the last two points alone would pass their noise on to the slope
            half = max(2, len(x) // 2)
            fitted_slope, _ = np.polyfit(x[-half:], y[-half:], 1)
            slope = max(0.0, float(fitted_slope))
            return float(y[-1] + slope * (microbatch - x[-1]))
        if microbatch < x[0]:
            # the straight line may fall below zero, a line through the origin does not
            through_origin = float(y[0] * microbatch / x[0])
            slope = float(y[1] - y[0]) / float(x[1] - x[0])
            straight = float(y[0] - slope * (x[0] - microbatch))
            return max(through_origin, straight)
        return float(np.interp(microbatch, x, y))

    def in_run(self, microbatch: int, launch_exposure: float) -> float:
        """Return `at`, with only a share `launch_exposure` of the launch time.

        Launch time: the seconds beyond work in proportion to the largest measured microbatch.
        """
        seconds = self.at(microbatch)
        largest = float(self.microbatches[-1])
        work = float(self.seconds[-1]) * microbatch / largest
        launch = max(0.0, seconds - work)
        return seconds - (1.0 - launch_exposure) * launch


def make_curve(points: Mapping[int, float]) -> Curve:
    """Return a curve through measured points.

    It is made non-decreasing by pooling neighbours that fall (isotonic regression).
    """
    microbatches = sorted(points)
    blocks: list[tuple[float, int]] = []  # mean seconds and number of neighbours pooled
    for microbatch in microbatches:
        mean = points[microbatch]
        count = 1
        # more sequences never take less time: a fall is noise
        while blocks and blocks[-1][0] > mean:
            before, size = blocks.pop()
            mean = (before * size + mean * count) / (size + count)
            count += size
        blocks.append((mean, count))

    seconds = list[float]()
    for mean, count in blocks:
        seconds += [mean] * count
    return Curve(np.array(microbatches, dtype=np.float64), np.array(seconds))


@dataclass(frozen=True, slots=True)
class PointSplit:
    """Parts of a single forward measured at microbatch `base`, in seconds.

    Launches do not grow with the microbatch; work and communication grow in proportion.
    """

    base: int
    launch_s: float
    work_s: float
    communication_s: float

    def at(
        self, microbatch: int, parameters: CostParameters, backward_share: float = 1.0
    ) -> tuple[float, float]:
        """Forward and backward seconds.

        Backward: each part times its ratio, the work also times `LayerSpec.backward_share`, the
        communication once.
        """
        scale = microbatch / self.base
        launch = parameters.launch_exposure * self.launch_s
        forward = launch + (self.work_s + self.communication_s) * scale

        backward_work = parameters.backward_ratio * backward_share * self.work_s
        backward_launch = parameters.launch_backward_ratio * launch
        backward = backward_launch + (backward_work + self.communication_s) * scale
        return forward, backward
