"""Traces of a step with many blocks, computed from those of steps with a few."""

from contextlib import nullcontext

import numpy as np
import pytest

from course_lib.budget.traces.equal_blocks import Growth, IrregularSteps
from course_lib.checkpoint import checkpoint_blocks
from course_lib.memory import MemoryMeter, symbolic
from course_lib.models import Decoder, random_tokens


def trace_of(layers, *, checkpointed=False, batches=1):
    """Return the trace of a symbolic decoder's forward and backward passes."""
    with symbolic():
        model = Decoder(vocabulary=97, hidden=16, heads=2, layers=layers, sequence=12)
        checkpoints = checkpoint_blocks(model) if checkpointed else nullcontext()
        with MemoryMeter(model) as meter, checkpoints:
            for _ in range(batches):
                model.loss(random_tokens(3, 12, 97)).backward()
    return meter.trace()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("batches", [1, 2])
def test_trace_extrapolated_to_eight_blocks_equals_real_trace(checkpointed, batches):
    few, more, whole = (trace_of(n, checkpointed=checkpointed, batches=batches) for n in (2, 3, 8))
    grown = Growth(few, more).trace(6)
    assert grown.operators == whole.operators and grown.flops == whole.flops
    assert np.array_equal(grown.live, whole.live)


def test_extrapolation_rejects_traces_that_differ_by_more_than_blocks():
    with pytest.raises(IrregularSteps):
        Growth(trace_of(2), trace_of(2, batches=2))
