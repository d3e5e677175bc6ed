"""The reference for an offloaded optimizer: the plain one on fp32 copies of the parameters."""

import torch
from torch import nn


class FP32Reference(torch.optim.Optimizer):
    """Optimizer that steps fp32 copies with `base`, then rounds them into the parameters.

    The copies of fp32 parameters share their memory, so it is a plain step there.
    """

    def __init__(self, params, base, **options):
        super().__init__(params, {})
        self.params = self.param_groups[0]["params"]
        self.copies = [nn.Parameter(p.detach().float()) for p in self.params]
        self.plain = base(self.copies, **options)

    @torch.no_grad()
    def step(self):
        for p, copy in zip(self.params, self.copies, strict=True):
            copy.grad = None if p.grad is None else p.grad.float()
        self.plain.step()
        self.write_copies()

    @torch.no_grad()
    def write_copies(self):
        """Round the fp32 copies into the parameters; also needed after an interrupted step."""
        for p, copy in zip(self.params, self.copies, strict=True):
            p.copy_(copy)
