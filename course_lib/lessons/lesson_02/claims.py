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
from course_lib.teaching import Claim, Table, text
from course_lib.teaching.claims import what_you_may_have_read

from .modes import modes

#: Claims that learners may have read.
CLAIMS = (
    Claim(
        "Training will be about 20% slower.",
        "FLOPs of the step with a checkpoint per layer",
        "Partly: 21% more FLOPs here. Seconds were not compared.",
        outcome="partly",
        source="Hugging Face Transformers documentation, Gradient checkpointing, before 5.17",
    ),
    Claim(
        "Full recomputation makes a layer 30% more expensive, since its whole forward runs again.",
        "FLOPs of eight layers, with checkpoints and without",
        "Partly: 23% here, because early stop leaves out the last product of each layer."
        " Without early stop it is a third.",
        outcome="partly",
        source="NVIDIA Megatron Bridge documentation, Activation Recomputation, before 0.5",
    ),
    Claim(
        "Selective recomputation takes away over 90% of the overhead.",
        "recomputed FLOPs, selective compared with a checkpoint per layer",
        "Holds in FLOPs: 92%, and 89% against recomputation that stops early. Seconds were not"
        " compared.",
        outcome="partly",
        source="Korthikanti et al. 2022, abstract",
    ),
    Claim(
        "A checkpoint around one layer saves memory.",
        "peak of eight layers alone, with no checkpoint, around the first, around the last",
        "Partly: it depends on the layer. Around the last layer, or around the only one, a"
        " checkpoint saves nothing.",
        outcome="partly",
    ),
)
#: Claims found only in the teaching documents from which the course was developed.
OLDER_CLAIMS = (
    Claim(
        "Non-reentrant checkpointing brings memory from O(N) to O(1).",
        "bytes that the decoder saves with a checkpoint per layer",
        "No: one input per layer stays. It is still O(N), with a smaller slope.",
        outcome="fails",
    ),
    Claim(
        "The non-reentrant mode analyses a static graph.",
        "a function that takes a different branch in each step",
        "No: it only puts hooks on saved tensors. The gradients are equal in every step.",
        outcome="fails",
    ),
    Claim(
        "The reentrant mode is more compatible.",
        "cases that work, reentrant : non-reentrant",
        "Partly: only for functions that forbid hooks. Otherwise the non-reentrant mode is"
        " more compatible.",
        outcome="partly",
    ),
    Claim(
        "`checkpoint_sequential` on the list of Linear layers equals the network.",
        "outputs compared",
        "No: the activation functions between the Linear layers are left out.",
        outcome="fails",
    ),
    Claim(
        "With `checkpoint_sequential` in its old mode, the network still trains.",
        "three segments, an input that needs no gradient: layers with gradients",
        "Partly: only the last segment trains. There is a warning, but no error.",
        outcome="partly",
    ),
)


def older_claims() -> Table:
    """Test the claims of the teaching documents, and return a table of the results."""
    score = [sum(row[column] == "✓" for row in modes(checkpoint)) for column in (1, 2)]
    equal, trained = _linear_layers_alone()
    return what_you_may_have_read(
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
    """Return the bytes that a decoder with a checkpoint per layer saves for backward."""
    with symbolic():
        decoder = Decoder(vocabulary=2048, hidden=256, heads=8, layers=layers, sequence=128)
        checkpoint_blocks(decoder, "layers.*")
        return saved_tensors(decoder.loss, random_tokens(8, 128, 2048)).total_bytes


def _steps_with_branches() -> int:
    """Count the steps, of two, in which checkpointed and plain gradients are equal.

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


def _linear_layers_alone() -> tuple[int, int]:
    """Return two counts on `checkpoint_sequential`: equal outputs of 64, and trained layers of 6.

    The first compares the outputs of the list of Linear layers with the whole network's. The second
    runs the network in the reentrant mode on an input that needs no gradient.
    """
    network, data = deep_mlp(depth=6, width=16), torch.randn(4, 16)
    linears = [module for module in network if isinstance(module, nn.Linear)]
    alone = checkpoint_sequential(linears, 3, data, use_reentrant=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint_sequential(network, 3, data).sum().backward()  # use_reentrant left out
    trained = sum(linear.weight.grad is not None for linear in linears)
    return int((alone == network(data)).sum()), trained
