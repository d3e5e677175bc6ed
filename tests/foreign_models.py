"""Models that this course did not write, for tests: their losses, blocks and places are their
own."""

import torch
from torch import nn
from torch.nn import functional as F

from course_lib.models import seeded

VOCABULARY, WIDTH, LENGTH, IGNORED = 53, 32, 12, -100


class Encoder(nn.Module):
    """PyTorch's own encoder, causal or not, with a head that has a bias; the loss of a dict."""

    def __init__(self, dropout=0.0, causal=True, norm=nn.LayerNorm):
        super().__init__()
        with seeded(0):
            layer = nn.TransformerEncoderLayer(
                WIDTH, 4, 48, dropout, batch_first=True, norm_first=True
            )
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, VOCABULARY)
        self.causal = causal

    def forward(self, tokens):
        mask = (
            nn.Transformer.generate_square_subsequent_mask(tokens.shape[1]) if self.causal else None
        )
        return self.head(self.encoder(self.embedding(tokens), mask, is_causal=self.causal))

    def loss_sum(self, batch):
        logits, labels = self(batch["tokens"]).view(-1, VOCABULARY), batch["labels"].flatten()
        return (
            F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"),
            (labels != IGNORED).sum(),
        )


class Grouped(nn.Module):
    """A block that takes and returns tuples, with keyword arguments, whose queries share keys and
    values."""

    def __init__(self, dropout):
        super().__init__()
        self.norm, self.q, self.kv = (
            nn.RMSNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), dropout

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
    """Blocks in a place of their own, and a head that is tied to the embedding."""

    def __init__(self, dropout=0.0):
        super().__init__()
        with seeded(1):
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
        logits, labels = (
            self.logits(batch["tokens"])[:, :-1].flatten(0, 1).float(),
            batch["labels"][:, 1:].flatten(),
        )
        if next(self.parameters()).dtype == torch.float64:
            logits = self.logits(batch["tokens"])[:, :-1].flatten(0, 1)
        return (
            F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"),
            (labels != IGNORED).sum(),
        )


class LowRank(nn.Module):
    """A frozen Linear and what is learned beside it."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, 2, bias=False)
        self.up = nn.Linear(2, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


def adapted():
    model = Decoder().requires_grad_(False)
    with seeded(2):
        for block in model.body["blocks"]:
            block.q, block.out = LowRank(block.q), LowRank(block.out)
    return model


def sentences(samples=6):
    with seeded(5):
        tokens = torch.randint(VOCABULARY, (samples, LENGTH))
        lengths = torch.arange(3, 3 + samples)[:, None]
    return {
        "tokens": tokens,
        "labels": tokens.masked_fill(torch.arange(LENGTH) >= lengths, IGNORED),
    }
