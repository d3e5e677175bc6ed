"""Claims about checkpoints that learners may have read, and measurements that test them."""

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from course_lib.checkpoint import checkpoint_blocks
from course_lib.labels import join_labels
from course_lib.memory import saved_tensors, symbolic
from course_lib.models import Decoder, deep_mlp, random_tokens
from course_lib.teaching import Table, text
from course_lib.teaching.claims import claims_table, read_claims

from .modes import modes

#: Claims that learners may have read elsewhere, and that this lesson tests.
CLAIMS = read_claims(__file__, "claims")
#: Claims found only in the teaching documents from which the course was developed.
OLDER_CLAIMS = read_claims(__file__, "older_claims")


def older_claims() -> Table:
    """Test claims from older documents about checkpoints, and return a table of the results."""
    score = [sum(row[column] == "✓" for row in modes(checkpoint)) for column in (1, 2)]
    equal, trained = _misuse_checkpoint_sequential()
    return claims_table(
        OLDER_CLAIMS,
        join_labels(
            [
                text("L = {depth}: {size} MB", depth=depth, size=f"{_saved_bytes(depth) / 1e6:.1f}")
                for depth in (4, 16)
            ],
            "; ",
        ),
        text("equal gradients in {n} of {all} steps", n=_steps_with_branches(), all=2),
        f"{score[0]} : {score[1]}",
        text("{n} of {all} numbers are equal", n=equal, all=64),
        f"{trained} / 6",
    )


def _saved_bytes(layers: int) -> int:
    """Return the bytes saved for backward by a decoder with one checkpoint per layer."""
    with symbolic():
        decoder = Decoder(vocabulary=2048, hidden=256, heads=8, layers=layers, sequence=128)
        checkpoint_blocks(decoder, "layers.*")
        return saved_tensors(decoder.loss, random_tokens(8, 128, 2048)).total_bytes


def _steps_with_branches() -> int:
    """Return in how many of two steps the gradients with and without a checkpoint are equal.

    Each step runs a different branch inside the checkpoint.
    """

    def gradient(function: Callable, run: Callable) -> torch.Tensor:
        x = torch.linspace(0, 1, 5).requires_grad_()
        return torch.autograd.grad(run(lambda x: function(x) * x, x).sum(), x)[0]

    def plainly(block: Callable, x: torch.Tensor) -> torch.Tensor:
        return block(x)

    def run_checkpointed(block: Callable, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False)

    return sum(
        torch.equal(gradient(branch, plainly), gradient(branch, run_checkpointed))
        for branch in (torch.sin, torch.cos)
    )


def _misuse_checkpoint_sequential() -> tuple[int, int]:
    """Return two counts for wrong uses of `checkpoint_sequential` on a network of 6 Linear layers.

    The first count is the number of right outputs, out of 64, if only the Linear layers are passed,
    without the other modules of the network. The second count is the number of layers that get a
    gradient in the reentrant mode if the input does not require a gradient.
    """
    network, data = deep_mlp(depth=6, width=16), torch.randn(4, 16)
    linears = [module for module in network if isinstance(module, nn.Linear)]
    alone = checkpoint_sequential(linears, 3, data, use_reentrant=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint_sequential(network, 3, data).sum().backward()  # use_reentrant left out
    trained = sum(linear.weight.grad is not None for linear in linears)
    return int((alone == network(data)).sum()), trained
