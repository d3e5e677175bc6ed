"""Random cases for `fuzz.py`: each function makes one case from a seeded generator, runs it with
the library and with an oracle that shares no code with it, and returns their difference."""

import math
import random
from collections.abc import Callable
from itertools import combinations, pairwise

import torch
from chains import cheapest_by_search, random_chain
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.accumulation import AccumulatedStep
from course_lib.attention import flash_attention
from course_lib.checkpoint.readable import checkpoint
from course_lib.memory import MemoryMeter
from course_lib.memory.allocator import _profile_allocations
from course_lib.schedule import (
    Backward,
    Chain,
    Forward,
    InfeasibleBudget,
    binomial,
    frontier,
    optimal,
    recursive,
    segments,
    simulate,
    sqrt_segments,
)

aten = torch.ops.aten
DIFFERENT = math.inf  # the difference if results cannot be compared as numbers


def difference_in_ulps(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors in units of the last place of the larger value:
    the machine epsilon of `found.dtype` times the largest entry of `expected`, at least 1."""
    if found.shape != expected.shape:
        return DIFFERENT
    if not found.numel():
        return 0.0
    size = max(1.0, float(expected.abs().max())) * torch.finfo(found.dtype).eps
    difference = float((found.double() - expected.double()).abs().max()) / size
    return DIFFERENT if math.isnan(difference) else difference


# ---- the meter: a random program on a pool of tensors

WIDTH = 16
STEPS: dict[str, Callable[[random.Random, list[Tensor]], Tensor]] = {
    "linear": lambda d, pool: F.linear(d.choice(pool), torch.randn(WIDTH, WIDTH) / 4),
    "add": lambda d, pool: d.choice(pool)[:2] + d.choice(pool)[:2],
    "gelu": lambda d, pool: F.gelu(d.choice(pool)),
    "softmax": lambda d, pool: d.choice(pool).contiguous().softmax(-1),
    "norm": lambda d, pool: F.layer_norm(d.choice(pool).contiguous(), (WIDTH,)),
    "dropout": lambda d, pool: F.dropout(d.choice(pool), 0.5),
    "cat": lambda d, pool: torch.cat([d.choice(pool), d.choice(pool)]),
    "slice": lambda d, pool: d.choice(pool)[: d.randint(1, 9)],
    "flip": lambda d, pool: d.choice(pool).flip(0),
    "index": lambda d, pool: d.choice(pool)[torch.zeros(d.randint(1, 9), dtype=torch.long)],
    "product": lambda d, pool: d.choice(pool)[:1].mul(d.choice(pool)),
    "in place": lambda d, pool: d.choice(pool).clone().mul_(0.5).relu_(),
    "expand": lambda d, pool: d.choice(pool)[:1].expand(d.randint(1, 9), WIDTH),
    "view": lambda d, pool: d.choice(pool).reshape(-1, WIDTH // 2, 2).transpose(1, 2).flatten(1),
    "detach": lambda d, pool: d.choice(pool).detach(),
    "where": lambda d, pool: torch.where(d.choice(pool)[:1] > 0, d.choice(pool), 0.0),
}


def program(draw: random.Random, weights: list[Tensor]) -> Callable[[], list[Tensor]]:
    """Return a function that runs the same random program at each call, with a backward pass."""
    seed, length = draw.getrandbits(32), draw.randint(3, 25)
    names = [draw.choice(list(STEPS)) for _ in range(length)]

    def run() -> list[Tensor]:
        torch.manual_seed(seed)
        pick, pool = random.Random(seed), list(weights)
        for name in names:
            pool.append(STEPS[name](pick, pool))
            if len(pool) > 6:
                del pool[pick.randrange(len(pool))]
        total = sum(each.square().mean() for each in pool if each.requires_grad)
        if isinstance(total, Tensor):
            total.backward()
        return pool

    return run


def meter(draw: random.Random) -> float:
    """Return the bytes by which the meter's peak or final bytes differ from the allocator's."""
    weights = [
        torch.randn(draw.randint(2, 40), WIDTH, requires_grad=draw.random() < 0.7)
        for _ in range(draw.randint(1, 3))
    ]
    run = program(draw, weights)

    def profiled(profile) -> None:
        with profile:
            kept.append(run())

    def free() -> None:
        kept.clear()
        for weight in weights:
            weight.grad = None

    kept: list[list[Tensor]] = []
    run()  # a first call allocates memory only once, which is not compared
    free()
    changes, _ = _profile_allocations(profiled)
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    free()
    with MemoryMeter() as found:
        kept.append(run())
        at_end = found.live_bytes
    return max(abs(peak - found.peak_bytes), abs(live - at_end))


# ---- checkpoints: a random tree of functions, some of them checkpointed


class Leaf(nn.Module):
    """A random layer, which may draw random numbers or change a tensor in place."""

    def __init__(self, draw: random.Random):
        super().__init__()
        self.kind = draw.choice(("dropout", "noise", "in place", "plain"))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.kind == "dropout":
            return F.dropout(y, 0.3) * torch.rand(1)
        if self.kind == "noise":
            return y.tanh() + torch.randn_like(y)
        if self.kind == "in place":
            return y.sin().mul_(0.9).relu_()
        return F.gelu(y)


class Tree(nn.Module):
    """A random structure: a sequence, a residual block, or branches that return a list in a dict,
    each of which may run in a checkpoint of a random kind."""

    def __init__(self, draw: random.Random, depth: int, how: list[str]):
        super().__init__()
        self.shape = draw.choice(("sequence", "residual", "branches"))
        self.how, self.stop = draw.choice(how), draw.random() < 0.5
        self.parts = nn.ModuleList(
            Tree(draw, depth - 1, how) if depth and draw.random() < 0.7 else Leaf(draw)
            for _ in range(draw.randint(1, 2))
        )

    def run(self, x: Tensor, history: list[int]) -> dict:
        history.append(len(history))
        scale = 0.5 ** len(history)  # a recomputation must get the list in its original state
        if self.shape == "branches":
            found = [part(x) for part in self.parts]
        else:
            y = x
            for part in self.parts:
                y = part(y)
            found = [x + y] if self.shape == "residual" else [y]
        return {"outputs": [y * scale for y in found]}

    def tensor(self, x: Tensor) -> Tensor:
        return torch.stack(self.run(x, [])["outputs"]).sum(0)

    def forward(self, x: Tensor) -> Tensor:
        if Plain.active or self.how == "none":
            return self.tensor(x)
        if self.how == "reentrant":
            return checkpoint(self.tensor, x, use_reentrant=True)
        options: dict = {"early_stop": self.stop}
        if self.how == "selective":
            kept = [aten.addmm.default, aten.tanh.default]
            options["keep"] = kept
        found = checkpoint(self.run, x, [], **options)
        return torch.stack(found["outputs"]).sum(0)


class Plain:
    """Switch with which trees run without their checkpoints."""

    active = False


def run_tree(tree: Tree, x: Tensor, *, plain: bool, seed: int) -> list[Tensor]:
    """Return outputs, gradients and the next random numbers of a forward and a backward pass."""
    tree.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    Plain.active = plain
    try:
        y = tree(x)
        numbers = torch.rand(4)
        y.square().sum().backward()
    finally:
        Plain.active = False
    gradients = [p.grad for p in tree.parameters() if p.grad is not None]
    return [y.detach(), numbers, torch.rand(4), x.grad, *gradients]


def checkpoints(draw: random.Random) -> float:
    """Return the largest difference from a run without checkpoints, in units of the last place."""
    # a selective checkpoint around another checkpoint recomputes what its policy keeps of neither
    how = draw.choice((["none", "reentrant", "not reentrant"], ["none", "not reentrant"]))
    how = how if draw.random() < 0.8 else ["none", "selective"]
    tree, seed = Tree(draw, draw.randint(0, 3), how), draw.getrandbits(32)
    x = torch.randn(draw.randint(2, 6), 8)
    found, expected = (run_tree(tree, x, plain=plain, seed=seed) for plain in (False, True))
    if len(found) != len(expected):
        return DIFFERENT
    return max(map(difference_in_ulps, found, expected))


# ---- schedules


def solver_error(draw: random.Random) -> float:
    """Return the bytes or time by which `frontier` and `optimal` differ from exhaustive search."""
    chain = random_chain(draw.randint(1, 5), draw.getrandbits(32), draw.choice((1, 4, 9)))
    points = cheapest_by_search(chain)
    found = [(cost.peak_bytes, cost.time) for cost in frontier(chain)]
    if found != points:
        return DIFFERENT
    budget = draw.randint(points[0][0], points[-1][0] + 3)
    cost = simulate(optimal(chain, budget), chain)
    best = min(time for peak, time in points if peak <= budget)
    try:
        optimal(chain, points[0][0] - 1)
    except InfeasibleBudget as error:
        wrong = (cost.peak_bytes > budget) + (error.least_bytes != points[0][0])
        return abs(cost.time - best) + wrong
    return DIFFERENT


def least_extra_forwards(length: int, slots: int, known: dict) -> int:
    """Return the least number of extra forwards, by trying each place of the next kept input."""
    if length == 1:
        return 0
    if slots == 1:
        return length * (length - 1) // 2
    if (length, slots) not in known:
        known[length, slots] = min(
            k
            + least_extra_forwards(length - k, slots - 1, known)
            + least_extra_forwards(k, slots, known)
            for k in range(1, length)
        )
    return known[length, slots]


def rule_error(draw: random.Random) -> float:
    """Return the forwards of `binomial` above the least, plus the bytes of `segments` above it."""
    length, slots = draw.randint(1, 24), draw.randint(1, 6)
    schedule = binomial(length, slots)
    cost = simulate(schedule, Chain.uniform(length))
    wrong = abs(cost.forward_steps - length - least_extra_forwards(length, slots, {}))
    kept, most = {0}, 1
    for action in schedule:
        if isinstance(action, Backward):
            kept.discard(action.stage)
        elif action.keep == "input":
            kept.add(action.stage)
            most = max(most, len(kept))
    wrong += max(0, most - slots)
    chain = random_chain(draw.randint(1, 7), draw.getrandbits(32))
    count = draw.randint(1, len(chain))
    peaks = [
        simulate(actions_of_segments([0, *cuts, len(chain)]), chain).peak_bytes
        for cuts in combinations(range(1, len(chain)), count - 1)
    ]
    if len(set(chain.stages)) > 1:
        wrong += abs(simulate(segments(chain, count), chain).peak_bytes - min(peaks))
    for rule in (recursive, sqrt_segments):  # legal, and not faster than no checkpoints
        least = sum(stage.forward_time + stage.backward_time for stage in chain.stages)
        wrong += max(0.0, least - simulate(rule(chain), chain).time)
    return wrong


def actions_of_segments(cuts: list[int]) -> list:
    """Return the actions of segments between these cuts, written without the library's rules."""
    parts = list(pairwise(cuts))
    first = [
        Forward(i, "input" if i == start else "nothing")
        for start, end in parts[:-1]
        for i in range(start, end)
    ]
    for start, end in reversed(parts):
        first += [Forward(i, "all") for i in range(start, end)]
        first += [Backward(i) for i in reversed(range(start, end))]
    return first


# ---- attention


def random_leaf(draw: random.Random, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return a random leaf tensor with random strides: permuted, cut out, or expanded."""
    how = draw.choice(("contiguous", "permuted", "cut", "expanded"))
    order = draw.sample(range(len(shape)), len(shape))
    if how == "permuted":
        stored = torch.randn([shape[i] for i in order], dtype=dtype)
        return stored.permute([order.index(i) for i in range(len(shape))]).requires_grad_()
    if how == "cut":
        stored = torch.randn([2 * n + 1 for n in shape], dtype=dtype)
        return stored[tuple(slice(1, None, 2) for _ in shape)].requires_grad_()
    if how == "expanded":
        return torch.randn([1, *shape[1:]], dtype=dtype).expand(shape).requires_grad_()
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def attention_by_definition(q, k, v, causal: bool, is_causal: bool, scale: float | None) -> Tensor:
    """Return attention by its definition; a query without an allowed key has output 0."""
    if q.dim() > 3:
        k, v = (each.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for each in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    n_q, n_k = scores.shape[-2:]
    shift = n_k - n_q if causal else 0
    seen = torch.ones(n_q, n_k, dtype=torch.bool)
    if causal or is_causal:
        seen = seen.tril(shift)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return weights.masked_fill(~seen.any(-1)[:, None], 0.0).nan_to_num(0.0) @ v


def flash(draw: random.Random) -> float:
    """Return the largest difference of output and gradients from the definition in float64."""
    dtype = draw.choice((torch.float32, torch.float64))
    n_q, n_k, d, d_v = (draw.randint(1, most) for most in (70, 70, 24, 24))
    heads, per_group = draw.randint(1, 3), draw.randint(1, 3)
    leading = [draw.randint(1, 2) for _ in range(draw.randint(0, 2))]
    many, few = [*leading, heads * per_group if leading else heads], [*leading, heads]
    shapes = [*many, n_q, d], [*few, n_k, d], [*few, n_k, d_v]
    qkv = [random_leaf(draw, shape, dtype) for shape in shapes]
    mask = draw.choice(("none", "causal", "is_causal"))
    masks = {"causal": mask == "causal", "is_causal": mask == "is_causal"}
    scale = draw.choice((None, draw.uniform(0.05, 1.5)))
    blocks = {name: draw.choice((None, draw.randint(1, 80))) for name in ("block_q", "block_k")}
    found = flash_attention(*qkv, scale=scale, backend="torch", **masks, **blocks)
    expected_of = [each.detach().double().requires_grad_() for each in qkv]
    expected = attention_by_definition(*expected_of, **masks, scale=scale)
    grad = torch.randn(expected.shape, dtype=dtype)
    pairs = [(found.detach(), expected.detach())]
    pairs += zip(
        torch.autograd.grad(found, qkv, grad),
        torch.autograd.grad(expected, expected_of, grad.double()),
        strict=True,
    )
    return max(difference_in_ulps(*pair) for pair in pairs)


# ---- accumulation


def loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, weights = batch
    return (model(x).square().mean(-1) * weights).sum(), weights.sum()


def cut(draw: random.Random, length: int) -> list[int]:
    """Return the sizes of random parts whose sum is `length`."""
    sizes = []
    while length:
        sizes.append(draw.randint(1, length))
        length -= sizes[-1]
    return sizes


def accumulation(draw: random.Random) -> float:
    """Return the largest difference of loss, weight, norm, gradients and updated weights from those
    of the whole batch, computed by autograd in float64."""
    dtype, samples = draw.choice((torch.float32, torch.float64)), draw.randint(1, 24)
    norm = draw.choice((None, math.inf, draw.uniform(1e-3, 10)))
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 3)).to(dtype)
    x = torch.randn(samples, 6, dtype=dtype) * 10 ** draw.uniform(-2, 2)
    weights = torch.tensor([float(draw.random() < 0.7) for _ in range(samples)], dtype=dtype)
    weights[draw.randrange(samples)] = 1
    double = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 3)).double()
    double.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in model.parameters())
    )
    parts = cut(draw, samples)
    micro_batches = zip(x.split(parts), weights.split(parts), strict=True)
    result = AccumulatedStep(model, optimizer, loss_sum, max_norm=norm)(micro_batches)
    total, count = loss_sum(double, (x.double(), weights.double()))
    (total / count).backward()
    gradients = [p.grad for p in double.parameters()]
    length = torch.stack([g.norm() for g in gradients]).norm()
    if norm is not None and length > norm:
        # PyTorch's clipping divides by the norm plus 1e-6
        gradients = [g * norm / (length + 1e-6) for g in gradients]
    pairs = list(zip(seen, gradients, strict=True))
    updated = [p.detach() - 0.5 * g for p, g in zip(double.parameters(), gradients, strict=True)]
    pairs += zip((p.detach() for p in model.parameters()), updated, strict=True)
    numbers = [(result.loss, total / count), (result.weight, count)]
    numbers += [(result.grad_norm, length)] if norm is not None else []
    pairs += [(torch.tensor(a, dtype=dtype), b.detach()) for a, b in numbers]
    return max(difference_in_ulps(*pair) for pair in pairs)
