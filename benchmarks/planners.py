"""Three planners of checkpoints for a budget: the course's `fit`, PyTorch's integer linear program
for selective checkpoints, and ckptplan.

On a CUDA device, PyTorch's program measures the time of each operator, and ckptplan measures bytes.
On a CPU they get the time that the FLOPs take at the laptop's rates, and the bytes that autograd
keeps for each layer.
"""

import contextlib
import dataclasses
import io
from functools import partial
from statistics import fmean

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy as Policy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from course_lib.budget import RATES, Recipe, build, estimate, fit, train_step
from course_lib.checkpoint import checkpoint_blocks
from course_lib.memory import saved_tensors

WAYS = [{"checkpoint": "none"}, {"checkpoint": "selective"}, {"checkpoint": "layers"}]
WAYS += [{"checkpoint": "layers", "first_blocks": n} for n in range(1, 8)]
WAYS += [{"checkpoint": "selective", "first_blocks": n} for n in range(1, 8)]
WAYS += [{"checkpoint": "segments", "segments": n} for n in range(2, 9)]


def by_course(make_decoder, make_tokens, budget: int):
    recipes = [Recipe(optimizer="sgd", **way) for way in WAYS]
    best = fit(make_decoder, make_tokens, budget, recipes=recipes, progress=False)[0].recipe
    model, optimizer = build(make_decoder, best)
    batch = make_tokens()
    return model, lambda: train_step(model, optimizer, batch, best)


class Whole(nn.Module):
    """A decoder whose forward pass is its loss, for tools that follow modules."""

    def __init__(self, make_decoder):
        super().__init__()
        self.decoder = make_decoder()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder.loss(tokens)


def by_ilp(make_decoder, make_tokens, budget: int):
    from torch.distributed._tools.ilp_utils import parse_module_info
    from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module as best
    from torch.distributed._tools.sac_ilp import sac_milp

    info, estimator = statistics(make_decoder, make_tokens)
    shares, _, peak = sac_milp(parse_module_info(info), budget / 2**30)
    if peak < 0:
        raise LookupError("the program has no solution")
    model, tokens = Whole(make_decoder), make_tokens()
    modules = dict(model.named_modules())
    for name, share in shares.items():
        found, module = estimator.sac_mod_stats[name], modules[name.removeprefix("Whole.")]
        kept = list(zip(found.func_names, best(found, 1 - share), strict=True))
        module.forward = partial(
            checkpoint, module.forward, use_reentrant=False, context_fn=partial(contexts, kept)
        )
    return model, lambda: model(tokens).backward()


def contexts(kept: list[tuple[str, int]]):
    """Return the `context_fn` result for a checkpoint that keeps the planned operators."""
    place = {False: 0, True: 0}

    def policy(ctx, op, *args, **kwargs):
        name, keep = kept[min(place[ctx.is_recompute], len(kept) - 1)]
        if op._overloadpacket.__name__ != name:
            return Policy.PREFER_RECOMPUTE
        place[ctx.is_recompute] += 1
        return Policy.MUST_SAVE if keep else Policy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def statistics(make_decoder, make_tokens):
    from torch.distributed._tools.ilp_utils import aggregate_stats
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    with FakeTensorMode(), contextlib.redirect_stdout(io.StringIO()):
        model, tokens, memory = Whole(make_decoder), make_tokens(), MemTracker()
        runtime, selective = RuntimeEstimator(), SACEstimator()
        runtime, selective = (tool("operator-level-cost-model") for tool in (runtime, selective))
        runtime._estimate = selective._estimate_runtime = milliseconds
        memory.track_external(model)
        for tool in (memory, runtime, selective):
            with tool:
                model(tokens).backward()
            model.zero_grad()
        return aggregate_stats(model, memory, runtime, selective, torch.device("cpu")), selective


def milliseconds(func, args, kwargs):
    """Return an operator's result, and its milliseconds at the laptop's rates."""
    out = func(*args, **(kwargs or {}))
    flops = flop_registry.get(func._overloadpacket)
    if flops is not None:
        return out, 1e3 * flops(*args, **(kwargs or {}), out_val=out) / RATES["laptop"].fp32_flops
    tensors = [] if func.is_view else [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
    return out, 1e3 * sum(t.nbytes for t in tensors) / 1e10


def by_ckptplan(make_decoder, make_tokens, hidden: int, budget: int):
    import ckptplan

    model, tokens = make_decoder(), make_tokens()
    x = torch.randn(len(tokens), tokens.shape[1] - 1, hidden, requires_grad=True)
    named = [(f"layers.{i}", layer) for i, layer in enumerate(model.layers)]
    blocks = ckptplan.declare_blocks(model, named)
    trials = {"device": "cpu", "dtype": torch.float32, "num_warmup": 1, "num_trials": 2}
    measured = ckptplan.profile_blocks(blocks, (x,), **trials)
    known = {"timing_only": False, "activation_bytes_method": "isolated_forward_delta"}
    for name in ("forward_time_ms_mean", "recompute_time_upper_bound_ms_mean"):
        # The layers are equal. Their times are averaged, or noise would determine the plan.
        known[name] = fmean(getattr(profile, name) for profile in measured)
    kept = [saved_tensors(layer, x).total_bytes for layer in model.layers]
    profiles = [
        dataclasses.replace(profile, **known, activation_bytes_estimate=count)
        for profile, count in zip(measured, kept, strict=True)
    ]
    plain = estimate(make_decoder, make_tokens, Recipe(optimizer="sgd")).peak_bytes
    plan = ckptplan.plan_checkpoints(
        profiles,
        blocks,
        target_kind="activation_budget_bytes",
        target_value=max(0, budget - (plain - sum(kept))),
        planner="dynamic_programming",
    )
    if not plan.feasible:
        raise LookupError("ckptplan finds no plan")
    names = [decision.block_id for decision in plan.decisions if decision.checkpointed]
    if names:
        checkpoint_blocks(model, names)
    return model, lambda: model.loss(tokens).backward()
