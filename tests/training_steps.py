"""Training steps for the tests of `course_lib.memory`, and an independent count of their bytes."""

import os
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from course_lib.models import Decoder, random_tokens

os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def square_mean(y):
    return (y**2).mean()


def train(model, x, loss=square_mean, optimizer=None, **options):
    optimizer = optimizer and optimizer(model.parameters(), **options)

    def step():
        loss(model(x)).backward()
        if optimizer is not None:
            optimizer.step()

    return model, optimizer, step


def mlp(activation=nn.GELU):
    layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), activation())]
    return train(nn.Sequential(*layers), torch.randn(256, 128), optimizer=torch.optim.Adam)


class Stack(nn.Module):
    """Post-norm or pre-norm layers of PyTorch's own, each under a checkpoint or not."""

    def __init__(self, *, norm_first, reentrant=None, layers=3, hidden=128):
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                hidden, 4, 4 * hidden, dropout=0.1, batch_first=True, norm_first=norm_first
            )
            for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = (
                layer(x)
                if self.reentrant is None
                else checkpoint(layer, x, use_reentrant=self.reentrant)
            )
        return x


def decoder(norm_first, reentrant):
    x = torch.randn(8, 64, 128, requires_grad=bool(reentrant))
    model, optimizer, plain = train(
        Stack(norm_first=norm_first, reentrant=reentrant), x, optimizer=torch.optim.Adam
    )

    def step():
        with sdpa_kernel(SDPBackend.MATH):
            plain()
        x.grad = None

    return model, optimizer, step


def batch_norm_and_pooling():
    layers = [
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(8),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(2),
    ]
    options = {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
    return train(nn.Sequential(*layers), torch.randn(8, 8, 32, 32), **options)


class TiedLanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.hidden = nn.Embedding(1000, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        return self.head(F.gelu(self.hidden(self.tokens(tokens))))


def tied_language_model():
    tokens, target = torch.randint(1000, (4, 64)), torch.randint(1000, (256,))
    return train(
        TiedLanguageModel(),
        tokens,
        lambda logits: F.cross_entropy(logits.view(-1, 1000), target),
        optimizer=torch.optim.Adam,
    )


def own_decoder():
    model = Decoder(vocabulary=200, hidden=64, heads=4, layers=2, sequence=32, dropout=0.1)
    return train(model, random_tokens(4, 32, 200)[:, :-1], optimizer=torch.optim.AdamW)


def in_place_views_and_expands():
    model, x = nn.Linear(128, 128), torch.randn(64, 128)

    def step():
        y = model(x).view(64, 8, 16).transpose(1, 2).expand(4, 64, 16, 8) * 2
        y += 1
        y.mul_(y.detach() + 1)
        y[0].add_(1)
        y.sum().backward()

    return model, None, step


def double_backward():
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))
    x = torch.randn(256, 64, requires_grad=True)

    def step():
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        ((slope.norm(dim=1) - 1) ** 2).mean().backward()
        x.grad = None

    return model, None, step


def optimizer_step(kind, **options):
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    return train(model, torch.randn(4, 256), optimizer=kind, lr=0.1, **options)


NO_WORKSPACE = {
    "mlp": mlp,
    "mlp, in-place ReLU": lambda: mlp(lambda: nn.ReLU(inplace=True)),
    "post-norm": lambda: decoder(False, None),
    "post-norm, checkpoint": lambda: decoder(False, False),
    "post-norm, reentrant checkpoint": lambda: decoder(False, True),
    "pre-norm": lambda: decoder(True, None),
    "this library's decoder": own_decoder,
    "batch norm and pooling": batch_norm_and_pooling,
    "embedding, tied head, cross-entropy": tied_language_model,
    "in-place, views, expands": in_place_views_and_expands,
    "double backward": double_backward,
    "NAdam, one by one": lambda: optimizer_step(torch.optim.NAdam, foreach=False),
    "NAdam, foreach": lambda: optimizer_step(torch.optim.NAdam, foreach=True),
    "SGD, one by one": lambda: optimizer_step(torch.optim.SGD, foreach=False, momentum=0.9),
    "SGD, foreach": lambda: optimizer_step(torch.optim.SGD, foreach=True, momentum=0.9),
}


def allocations(step):
    """The independent oracle: bytes of each allocation (+) and release (-), in order, as the
    allocator reports them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    events = enumerate(profile.profiler.kineto_results.events())
    changes = sorted(
        (event.start_ns(), i, event.nbytes()) for i, event in events if event.name() == "[memory]"
    )
    return [change for _, _, change in changes]


def empty_gradients(model):
    for parameter in model.parameters():
        parameter.grad = None


def one_more_sample():
    """A sample tells what was live when its operator returned; what died after the last one shows
    in the next."""
    torch.empty(0)


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def at_end(meter):
    return {name: int(values[-1]) for name, values in meter.series().items()}


class Wraps(torch.optim.Optimizer):
    """Another optimizer does its step, between work of its own; its state is there and shows here
    as nothing."""

    def __init__(self, params, base=torch.optim.Adam):
        super().__init__(params, {"lr": 0.1})
        self.base = base(self.param_groups[0]["params"], lr=0.1, foreach=False)

    @torch.no_grad()
    def step(self, closure=None):
        copies = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.base.step()
        torch._foreach_mul_(copies, 2.0)

    def held_tensors(self):
        return (v for state in self.base.state.values() for v in state.values())

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, content):
        self.base.load_state_dict(content)


@contextmanager
def everything_undone_afterwards():
    from torch.optim import optimizer

    def state():
        hooks = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        return torch.get_rng_state, *map(len, hooks), len(modes), dict(vars(torch.UntypedStorage))

    before = state()
    yield
    assert state() == before


def run_under(step, *contexts):
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        step()
