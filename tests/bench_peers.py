"""Peers of course_lib.budget, where they are installed: how far their predictions are from a step
that is run for real, and what the checkpoints that they propose for a budget take, run for real.

`pip install -e '.[peers]' -c constraints.txt` for all of them; what is missing or fails says so in
its row. PyTorch's ILP (torch.distributed._tools.sac_ilp) asks a CUDA device for the time of each
operator, and ckptplan for its bytes: on a CPU the first gets FLOPs and bytes at the laptop's rates
instead, the second what autograd keeps for each layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from course_lib.budget import RATES, InfeasibleBudget, Recipe, build, estimate, fit, train_step
from course_lib.checkpoint import checkpoint_blocks
from course_lib.configs import Llama
from course_lib.memory import MemoryMeter, saved_tensors
from course_lib.memory.allocator import allocator_peak
from course_lib.models import Decoder, deep_mlp, random_tokens


def tried(found: Callable[[], str]) -> str:
    """What is found, or why nothing is, and the seconds that it took."""
    start = time.perf_counter()
    try:
        return found()
    except ImportError as error:
        return f"not installed ({error})"
    except InfeasibleBudget:
        return f"finds no plan{time.perf_counter() - start:50.2f} s"
    except Exception as error:  # of a peer's own: the others are still to be seen
        return f"fails: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:80]}"


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(*deep_mlp(8, 2048))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()


LLAMA = {
    "vocabulary": 4000,
    "hidden": 256,
    "layers": 6,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 32,
    "feedforward": 688,
}
# and the shape and number of the samples
MODELS: dict[str, tuple[Callable, Callable, tuple[int, ...], int]] = {
    "MLP": (Mlp, partial(torch.ones, 1024, 2048), (2048,), 1024),
    "GPT": (
        partial(Decoder, vocabulary=4000, hidden=256, layers=6, heads=8, sequence=256),
        partial(random_tokens, 4, 256, 4000),
        (257,),
        4,
    ),
    "Llama": (partial(Llama, **LLAMA), partial(random_tokens, 4, 256, 4000), (257,), 4),
}


# ---- predictions


def real(make_model, make_batch) -> tuple[int, int]:
    """The peak of tensors and of the allocator, in the second step of AdamW."""
    model, optimizer = build(make_model, Recipe(), state=True)
    batch = make_batch()

    def step(*modes) -> None:
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            train_step(model, optimizer, batch, Recipe())

    with MemoryMeter(model, optimizer) as meter:
        step()
    return meter.peak_bytes, meter.entry_bytes + allocator_peak(step, torch.device("cpu"))


def by_course(make_model, make_batch, shape, samples) -> int:
    return estimate(make_model, make_batch, Recipe()).peak_bytes


def by_tracker(make_model, make_batch, shape, samples) -> int:
    with FakeTensorMode():
        model, batch = make_model(), make_batch()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for _ in range(2):  # the first one makes the state
                model.loss(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
    return max(at["Total"] for at in tracker.get_tracker_snapshot("peak").values())


def by_kitsune(make_model, make_batch, shape, samples) -> int:
    from kitsune.predict import predict_memory

    found = predict_memory(make_model(), input_shape=shape, batch_size=samples, optimizer="adamw")
    # Its 15 % for context and allocator are left out: what is compared are tensors.
    return found.param_bytes + found.gradient_bytes + found.optimizer_bytes + found.activation_bytes


def by_accelerate(make_model, make_batch, shape, samples) -> int:
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    return int(
        max(estimate_training_usage(calculate_maximum_sizes(make_model())[0], "float32").values())
    )


PREDICTORS = {
    "course_lib.budget": by_course,
    "PyTorch MemTracker": by_tracker,
    "torch-kitsune": by_kitsune,
    "accelerate": by_accelerate,
}


def predictions() -> None:
    print(
        "the peak of a step with AdamW, fp32, predicted, against the tensors of the step that"
        " is run"
    )
    for name, (make_model, make_batch, shape, samples) in MODELS.items():
        tensors, allocator = real(make_model, make_batch)
        more = f"the allocator's peak {allocator:,}, {allocator / tensors - 1:+.2%}"
        print(f"\n{name}: {tensors:,} bytes; {more}")
        for peer, predict in PREDICTORS.items():
            found = partial(
                run_prediction, predict, (make_model, make_batch, shape, samples), tensors
            )
            print(f"{peer:>20}  {tried(found)}")


def run_prediction(predict: Callable[..., int], case: tuple, tensors: int) -> str:
    start = time.perf_counter()
    found = predict(*case)
    return f"{found:15,} bytes  {found / tensors - 1:+8.2%}  {time.perf_counter() - start:6.2f} s"


# ---- plans

SIZES = {"vocabulary": 512, "hidden": 256, "heads": 8, "layers": 8, "sequence": 256}
make_decoder, make_tokens = partial(Decoder, **SIZES), partial(random_tokens, 4, 256, 512)
SGD = Recipe(optimizer="sgd")
Plan = tuple[nn.Module, Callable[[], object]]  # the model with the plan in it, and its step


class Whole(nn.Module):
    """A decoder whose forward is its loss, for tools that follow modules."""

    def __init__(self):
        super().__init__()
        self.decoder = make_decoder()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder.loss(tokens)


def taken(model: nn.Module, step: Callable[[], object]) -> tuple[int, int]:
    """Peak and FLOPs, run for real."""
    with MemoryMeter(model) as meter:
        step()
    model.zero_grad()
    with FlopCounterMode(display=False) as counter:
        step()
    return meter.peak_bytes, counter.get_total_flops()


def plan_of_course(budget: int) -> Plan:
    """The cheapest among its ways to checkpoint, as `fit` finds it."""
    room = budget - 8 * sum(p.numel() for p in make_decoder().parameters())
    ways = [{"checkpoint": "none"}, {"checkpoint": "selective"}, {"checkpoint": "layers"}]
    firsts = range(1, SIZES["layers"])
    ways += [
        {"checkpoint": way, "first_blocks": count}
        for way in ("layers", "selective")
        for count in firsts
    ]
    ways += [
        {"checkpoint": "segments", "segments": count} for count in range(2, SIZES["layers"] + 1)
    ]
    ways += [
        {"checkpoint": "optimal", "schedule_bytes": int(room * share)}
        for share in (1.2, 1.1, 1.0, 0.9)
    ]
    recipes = [Recipe(optimizer="sgd", **way) for way in ways]
    best = fit(make_decoder, make_tokens, budget, recipes=recipes, progress=False)[0].recipe
    model, optimizer = build(make_decoder, best)
    batch = make_tokens()
    return model, lambda: train_step(model, optimizer, batch, best)


def plan_of_ilp(budget: int) -> Plan:
    """Per module a share of its activations to forget; within the module, the operators that its
    other ILP chooses."""
    from torch.distributed._tools.ilp_utils import parse_module_info
    from torch.distributed._tools.sac_ilp import (
        get_optimal_checkpointing_policy_per_module,
        sac_milp,
    )

    info, estimator = statistics_of_ilp()
    shares, _, peak = sac_milp(parse_module_info(info), budget / 2**30)
    if peak < 0:
        raise InfeasibleBudget(budget, None, "the ILP finds no plan")
    model, tokens = Whole(), make_tokens()
    modules = dict(model.named_modules())
    for name, share in shares.items():
        found = estimator.sac_mod_stats[name]
        decisions = get_optimal_checkpointing_policy_per_module(found, 1 - share)
        kept = list(zip(found.func_names, decisions, strict=True))
        module = modules[name.removeprefix("Whole.")]
        module.forward = partial(
            checkpoint, module.forward, use_reentrant=False, context_fn=partial(contexts, kept)
        )
    return model, lambda: model(tokens).backward()


def contexts(kept: list[tuple[str, int]]):
    """For a checkpoint that keeps what the decisions say; they know no copy that only a view of it
    is seen of."""
    place = {False: 0, True: 0}

    def policy(ctx, op, *args, **kwargs):
        name, keep = kept[min(place[ctx.is_recompute], len(kept) - 1)]
        if op._overloadpacket.__name__ != name:
            return CheckpointPolicy.PREFER_RECOMPUTE
        place[ctx.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def statistics_of_ilp():
    from torch.distributed._tools.ilp_utils import aggregate_stats
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    with FakeTensorMode(), contextlib.redirect_stdout(io.StringIO()):
        model, tokens = Whole(), make_tokens()
        memory, runtime, selective = MemTracker(), RuntimeEstimator(), SACEstimator()
        runtime, selective = (tool("operator-level-cost-model") for tool in (runtime, selective))
        runtime._estimate = selective._estimate_runtime = milliseconds
        memory.track_external(model)
        for tool in (memory, runtime, selective):
            with tool:
                model(tokens).backward()
            model.zero_grad()
        return aggregate_stats(model, memory, runtime, selective, torch.device("cpu")), selective


def milliseconds(func, args, kwargs):
    """An operator's result, and its time at the laptop's rates: of its product, else of the bytes
    that it makes."""
    out = func(*args, **(kwargs or {}))
    flops = flop_registry.get(func._overloadpacket)
    if flops is not None:
        return out, 1e3 * flops(*args, **(kwargs or {}), out_val=out) / RATES["laptop"].fp32_flops
    made = (
        0
        if func.is_view
        else sum(x.nbytes for x in tree_leaves(out) if isinstance(x, torch.Tensor))
    )
    return out, 1e3 * made / 1e10


def plan_of_ckptplan(budget: int) -> Plan:
    """Which of the layers are checkpointed whole, by dynamic programming."""
    import ckptplan

    model, tokens = make_decoder(), make_tokens()
    x = torch.randn(4, 256, SIZES["hidden"], requires_grad=True)
    blocks = ckptplan.declare_blocks(
        model, [(f"layers.{i}", layer) for i, layer in enumerate(model.layers)]
    )
    profiles = ckptplan.profile_blocks(
        blocks, (x,), device="cpu", dtype=torch.float32, num_warmup=1, num_trials=2
    )
    kept = [saved_tensors(layer, x).total_bytes for layer in model.layers]
    profiles = [
        dataclasses.replace(
            profile,
            timing_only=False,
            activation_bytes_estimate=count,
            activation_bytes_method="isolated_forward_delta",
        )
        for profile, count in zip(profiles, kept, strict=True)
    ]
    plain = estimate(make_decoder, make_tokens, SGD).peak_bytes
    plan = ckptplan.plan_checkpoints(
        profiles,
        blocks,
        target_kind="activation_budget_bytes",
        target_value=max(0, budget - (plain - sum(kept))),
        planner="dynamic_programming",
    )
    if not plan.feasible:
        raise InfeasibleBudget(budget, None, "ckptplan finds no plan")
    names = [decision.block_id for decision in plan.decisions if decision.checkpointed]
    if names:
        checkpoint_blocks(model, names)
    return model, lambda: model.loss(tokens).backward()


PLANNERS = {
    "course_lib.budget": plan_of_course,
    "PyTorch SAC ILP": plan_of_ilp,
    "ckptplan": plan_of_ckptplan,
}


def plans() -> None:
    plain = estimate(make_decoder, make_tokens, SGD)
    print(
        f"\ncheckpoints of a decoder with 8 layers, SGD; plain {plain.peak_bytes:,} bytes,"
        f" {plain.flops:,} FLOPs"
    )
    logging.disable(logging.ERROR)  # the ILP says in red what is said here in a line
    for share in (0.8, 0.6, 0.4, 0.3):
        budget = int(share * plain.peak_bytes)
        print(f"\nbudget {budget:,} bytes, {share:.0%}")
        for peer, planned in PLANNERS.items():
            print(f"{peer:>20}  {tried(partial(run_plan, planned, budget, plain.flops))}")


def run_plan(planned: Callable[[int], Plan], budget: int, plain_flops: int) -> str:
    start = time.perf_counter()
    plan = planned(budget)
    seconds = time.perf_counter() - start
    peak, flops = taken(*plan)
    verdict = "fits" if peak <= budget else f"over by {peak / budget - 1:.1%}"
    return f"{peak:15,} bytes, {verdict:13} {flops / plain_flops:5.2f} x FLOPs  {seconds:6.2f} s"


def main() -> None:
    print(f"course_lib.budget and its peers, torch {torch.__version__}, on a CPU")
    predictions()
    plans()


if __name__ == "__main__":
    main()
