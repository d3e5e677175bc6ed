"""Traces of a step with many blocks, computed from those of steps with a few."""

from contextlib import nullcontext

import numpy as np
import pytest

from course_lib.budget.growth import Growth
from course_lib.checkpoint import checkpoint_blocks
from course_lib.memory import MemoryMeter, symbolic
from course_lib.memory.trace import Irregular
from course_lib.models import Decoder, random_tokens


def trace_of(layers, *, checkpointed=False, batches=1, **options):
    """Forward and backward of a decoder on symbolic tensors, from its second micro-batch on with
    gradients there."""
    with symbolic():
        model = Decoder(vocabulary=97, hidden=16, heads=2, layers=layers, sequence=12)
        with (
            MemoryMeter(model, **options) as meter,
            checkpoint_blocks(model) if checkpointed else nullcontext(),
        ):
            for _ in range(batches):
                model.loss(random_tokens(3, 12, 97)).backward()
    return meter.trace()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("batches", [1, 2])
def test_a_step_grown_from_two_blocks_and_three_is_that_of_eight_and_so_are_its_storages(
    checkpointed, batches
):
    few, more, whole = (trace_of(n, checkpointed=checkpointed, batches=batches) for n in (2, 3, 8))
    grown = Growth(few, more).trace(6)
    assert grown.operators == whole.operators
    assert np.array_equal(grown.live, whole.live) and np.array_equal(grown.replayed(), whole.live)
    assert (grown.flops, grown.peak_bytes, grown.at_peak()) == (
        whole.flops,
        whole.peak_bytes,
        whole.at_peak(),
    )
    assert len({span.storage for span in grown.spans}) == len(
        {span.storage for span in whole.spans}
    )
    lives = [
        sorted((s.start, s.stop, s.bytes, s.category) for s in trace.spans)
        for trace in (grown, whole)
    ]
    assert lives[0] == lives[1]


def test_a_step_does_not_grow_where_its_passes_differ_by_no_block():
    with pytest.raises(Irregular):
        Growth(trace_of(2), trace_of(2, batches=2))
