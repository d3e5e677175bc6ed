"""What each kind of step takes, as arrays: the referee's rules, for those who look for schedules."""

from __future__ import annotations

import numpy as np

from course_lib._check import kind

from .chain import Chain

MANY = 1 << 60  # bytes: more than there are


class Sizes:
    """The chain's bytes and times.

    Steps work on stages s to t, both included, with x_s kept by others and not counted, and with the gradient of
    x_{t+1} counted where it is alive already: not for t = L-1, whose gradient comes with its backward.
    """

    def __init__(self, chain: Chain):
        stages, length = kind("chain", chain, Chain, "a Chain").stages, len(chain)
        self.length = length
        self.values = np.array([chain.input_bytes, *(stage.output_bytes for stage in stages)], dtype=np.int64)
        self.saved = np.array([stage.saved_bytes for stage in stages], dtype=np.int64)
        self.forward = self.saved + [stage.forward_overhead_bytes for stage in stages]
        self.backward = self.saved + self.values[1:] + [stage.backward_overhead_bytes for stage in stages]
        self.gradient = np.append(self.values[1:length], 0)  # of x_{t+1}, during the forwards of stages up to t
        # through[s, e]: what running from x_s to x_e takes, x_s kept and the rest dropped on the way
        self.through = np.zeros((length, length + 1), dtype=np.int64)
        for s in range(length):
            running = self.forward[s:].copy()
            running[1:] += self.values[s + 1 : length]
            self.through[s, s + 1 :] = np.maximum.accumulate(running)
        self.own_time = np.array([float(stage.forward_time + stage.backward_time) for stage in stages])
        self.elapsed = np.cumsum([0.0, *(stage.forward_time for stage in stages)])
