"""Models in the style of other libraries, with their own losses, blocks and names."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from course_lib.models import seed_generators

VOCABULARY, WIDTH, LENGTH, IGNORED = 53, 32, 12, -100
causal_mask = nn.Transformer.generate_square_subsequent_mask


def loss_and_count(logits, labels):
    """Return the sum of the losses of all labels except ignored ones, and the number of these."""
    total = F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORED)
    return total, (labels != IGNORED).sum()


class Encoder(nn.Module):
    """PyTorch's encoder, causal or not, with a head that has a bias, for batches that are dicts."""

    def __init__(self, dropout=0.0, causal=True):
        super().__init__()
        with seed_generators(0):
            layer = nn.TransformerEncoderLayer(
                WIDTH, 4, 48, dropout, batch_first=True, norm_first=True
            )
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, VOCABULARY)
        self.causal = causal

    def forward(self, tokens):
        mask = causal_mask(tokens.shape[1]) if self.causal else None
        return self.head(self.encoder(self.embedding(tokens), mask, is_causal=self.causal))

    def loss_sum(self, batch):
        return loss_and_count(self(batch["tokens"]).view(-1, VOCABULARY), batch["labels"])


class Grouped(nn.Module):
    """Block with grouped-query attention that has tuples and keyword arguments as inputs."""

    def __init__(self, dropout):
        super().__init__()
        self.norm, self.dropout = nn.RMSNorm(WIDTH), dropout
        self.q, self.kv, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, state, *, scale):
        x, count = state
        (b, s, _), n = x.shape, self.norm(x)
        q = self.q(n).view(b, s, 4, 8).transpose(1, 2)
        k, v = self.kv(n).view(b, s, 2, 16).transpose(1, 2).chunk(2, -1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        o = F.dropout(
            F.silu(self.out(o.transpose(1, 2).reshape(b, s, WIDTH))), self.dropout, self.training
        )
        return x + o, count + 1


class Decoder(nn.Module):
    """Blocks in a list inside a dict, and a head that is tied to the embedding."""

    def __init__(self, dropout=0.0):
        super().__init__()
        with seed_generators(1):
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.body = nn.ModuleDict({"blocks": nn.ModuleList(Grouped(dropout) for _ in range(3))})
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def hidden(self, tokens):
        state = self.embedding(tokens), 0
        for block in self.body["blocks"]:
            state = block(state, scale=0.3)
        assert state[1] == 3
        return state[0]

    def logits(self, tokens):
        return self.head(self.hidden(tokens))

    def loss_sum(self, batch):
        logits = self.logits(batch["tokens"])[:, :-1].flatten(0, 1)
        if next(self.parameters()).dtype != torch.float64:
            logits = logits.float()
        return loss_and_count(logits, batch["labels"][:, 1:])


class LowRank(nn.Module):
    """A frozen Linear with a trained low-rank update."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, 2, bias=False)
        self.up = nn.Linear(2, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


def adapted():
    model = Decoder().requires_grad_(False)
    with seed_generators(2):
        for block in model.body["blocks"]:
            block.q, block.out = LowRank(block.q), LowRank(block.out)
    return model


def sentences(samples=6):
    with seed_generators(5):
        tokens = torch.randint(VOCABULARY, (samples, LENGTH))
        lengths = torch.arange(3, 3 + samples)[:, None]
    return {
        "tokens": tokens,
        "labels": tokens.masked_fill(torch.arange(LENGTH) >= lengths, IGNORED),
    }


class Pictures(nn.Module):
    """Convolutions with BatchNorm, a frozen one among them."""

    def __init__(self):
        super().__init__()
        with seed_generators(3):
            self.stem = nn.Conv2d(3, 8, 3, padding=1)
            self.stages = nn.ModuleList(
                nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
                for _ in range(3)
            )
            self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = x + stage(x)
        return self.head(x.mean((2, 3)))

    def loss_sum(self, batch):
        return F.cross_entropy(self(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


def pictures():
    with seed_generators(5):
        return {"x": torch.randn(6, 3, 8, 8), "y": torch.arange(6) % 5}


class Averaging(nn.Linear):
    """Linear layer that subtracts a running average, which it updates in each call."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        y = super().forward(x) - self.average
        self.average.mul_(0.5).add_(y.detach().mean(0))
        return y


AVERAGES = {
    "spectral norm": lambda linear: [nn.utils.parametrizations.spectral_norm(linear)],
    "average": lambda linear: [Averaging()],
    "batch norm": lambda linear: [linear, nn.BatchNorm1d(WIDTH)],
}


def averaged(kind):
    with seed_generators(4):
        layers = (AVERAGES[kind](nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        return nn.Sequential(*(nn.Sequential(*each, nn.Tanh()) for each in layers))


def point():
    with seed_generators(5):
        return {"x": torch.randn(6, WIDTH)}


def cube(model, batch):
    return (model(batch["x"]) ** 3).sum(), len(batch["x"])


class Config:
    use_cache, _attn_implementation = True, "eager"


class Tiny(nn.Module):
    """Model with the interface of Hugging Face's; `kind` selects how its loss uses the labels."""

    def __init__(self, kind):
        super().__init__()
        self.config, self.kind, self.decoder = Config(), kind, Decoder()
        with seed_generators(4):
            self.wide = nn.Linear(WIDTH, 5) if kind == "classes" else None

    def set_attn_implementation(self, name):
        if name not in ("eager", "sdpa"):
            raise ValueError(f"no {name}")
        self.config._attn_implementation = name

    def get_output_embeddings(self):
        return self.decoder.head

    def forward(self, input_ids, labels=None, extra=None):
        assert not self.config.use_cache
        hidden = self.decoder.hidden(input_ids)
        if self.config._attn_implementation == "eager":
            hidden = hidden * 1
        if self.kind == "classes":
            return {"loss": F.cross_entropy(self.wide(hidden.mean(1)), labels)}
        logits = self.decoder.head(hidden)
        if labels is None:
            return {"loss": None, "logits": logits}
        if self.kind == "capped":
            logits = 3 * torch.tanh(logits / 3)
        if self.kind == "causal":
            labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        loss = nn.CrossEntropyLoss()(logits.view(-1, VOCABULARY), labels.reshape(-1))
        return {
            "loss": loss + 0.1 * hidden.square().mean() if self.kind == "more" else loss,
            "logits": logits,
        }


TinyForCausalLM = type("TinyForCausalLM", (Tiny,), {})
TinyForSequenceClassification = type("TinyForSequenceClassification", (Tiny,), {})
KINDS = [partial(TinyForCausalLM, kind) for kind in ("causal", "masked")]
KINDS.append(partial(TinyForSequenceClassification, "classes"))


def labelled(make, samples=6):
    batch = sentences(samples)
    labels = torch.where(
        batch["labels"] == IGNORED, IGNORED, (7 * batch["tokens"] + 3) % VOCABULARY
    )
    labels = batch["tokens"][:, 0] % 5 if make.args == ("classes",) else labels
    return {"input_ids": batch["tokens"], "labels": labels, "extra": "unchanged"}


class Tower(nn.Module):
    """Different blocks, which are not in a list, so that only its own `stages` form a chain."""

    def __init__(self, dropout=0.0):
        super().__init__()
        with seed_generators(9):
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.wide = nn.Sequential(nn.Linear(WIDTH, 48), nn.Tanh(), nn.Linear(48, WIDTH))
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.narrow = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
            self.head = nn.Linear(WIDTH, VOCABULARY)
        self.dropout = dropout

    def mixed(self, x):
        return x + F.dropout(self.attention(x, x, x, need_weights=False)[0], self.dropout)

    def total(self, x, labels):
        return loss_and_count(self.head(x).flatten(0, 1), labels)

    def stages(self, batch):
        mixed = partial(type(self).mixed, self)
        total = partial(self.total, labels=batch["labels"])
        return [
            lambda batch: batch["tokens"], self.embedding, self.wide, mixed, self.narrow, total
        ]  # fmt: skip

    def loss_sum(self, batch):
        x = self.narrow(self.mixed(self.wide(self.embedding(batch["tokens"]))))
        return self.total(x, batch["labels"])


class Translator(nn.Transformer):
    def __init__(self, causal):
        super().__init__(16, 2, 1, 1, 32, batch_first=True)
        self.causal = causal

    def loss(self, x):
        mask = self.causal(x.shape[1])
        return self(x, x, tgt_mask=mask).square().mean()
