"""Costs of attention: FLOPs, and bytes moved to and from the slow memory.

FLOPs of a head with N positions of d features: each product of (N, d) and (d, N), or (N, N) and (N,
d), takes 2 N^2 d. Forward has two of them, 4 N^2 d, in both kinds. Backward has four, 8 N^2 d (dV,
dP, dQ, dK); flash makes the scores again, 10 N^2 d in one walk. This package's kernels walk twice,
once for dK and dV, once for dQ, and make S and dP in both, 14 N^2 d: no two instances write to one
place, so the sums are the same each time. exp, maximum and sums are not counted: they are O(N^2).

Elements moved, where each operator reads its inputs once and writes its output once:

- standard, forward: S = Q K^T reads 2 N d and writes N^2; P = softmax(S) reads and writes N^2; O =
  P V reads N^2 + N d and writes N d. Together 4 N^2 + 4 N d.
- standard, backward: dV = P^T dO moves N^2 + 2 N d; dP = dO V^T as much; dS = P * (dP - rowsum(dP *
  P)) moves 3 N^2; dQ = dS K and dK = dS^T Q move N^2 + 2 N d each. Together 7 N^2 + 8 N d.
- flash, forward: blocks of B = M / (4 d) rows of Q and of O stay on chip, M being the elements that
  `sram_bytes` hold; the other half is for short tiles of K, V and S. Q is read once, O and the
  log-sum-exp are written once, and K and V are read once for each of N / B blocks: 2 N d + N + 2 N
  d * N / B. Leading term: 8 N^2 d^2 / M.
- flash, backward: D = rowsum(dO * O) moves 2 N d + N. Blocks of B = M / (8 d) rows of K, V, dK and
  dV stay on chip, read or written once, 4 N d; for each of N / B blocks, Q and dO are read, dQ is
  read and written, the log-sum-exp and D are read: 4 N d + 2 N. Leading term: 32 N^2 d^2 / M.
- the same in two walks: the first as above without dQ, 2 N d a block; the second keeps Q, dO and
  dQ, 3 N d, reads the log-sum-exp and D once and K and V for each block, 2 N d. Both together: 9 N
  d + 4 N d * N / B.

Blocks are whole: B is rounded down, N / B up. Elements have `dtype_bytes`, the log-sum-exp and D
four. A GPU moves fewer bytes than this where its L2 cache holds what several blocks read, and more
where it masks or drops out in operators of their own.

Source: Dao et al. 2022, arXiv:2205.14135, theorem 2 (standard attention Theta(N d + N^2), flash
Theta(N^2 d^2 / M)) and appendix B; the order of the loops and the log-sum-exp are those of Dao
2023, arXiv:2307.08691.
"""

from __future__ import annotations

from dataclasses import dataclass

from course_lib import _check


@dataclass(frozen=True)
class AttentionCost:
    """Costs of one pass of attention.

    Attributes:
        flops: floating-point operations of the matrix products; a multiplication and an addition
            count as two.
        moved_bytes: read from and written to the slow memory (a GPU's HBM), by the count of
            `attention_cost`.
    """

    flops: int
    moved_bytes: int

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs per byte moved: left of a roofline's ridge, the memory is the limit, right of it
        the arithmetic."""
        return self.flops / self.moved_bytes


def attention_cost(
    *,
    sequence: int,
    head_dim: int,
    batch: int = 1,
    heads: int = 1,
    kind: str,
    pass_: str = "forward",
    sram_bytes: int = 163 * 2**10,
    dtype_bytes: int = 2,
    walks: int = 1,
) -> AttentionCost:
    """FLOPs and bytes moved of one pass of attention, not causal, with as many keys as queries.

    The head of this module has the count.

    Args:
        sequence, head_dim: N and d.
        batch, heads: all is multiplied by these.
        kind: "standard" or "flash".
        pass_: "forward" or "backward".
        sram_bytes: fast memory that one block of threads can use; on an A100 163 KiB of its 192.
            Kernels take less: 64 or 128 queries of d = 64 are 32 or 64 KiB.
        dtype_bytes: of an element; 2 in half precision.
        walks: 2 for a flash backward that walks once for dK and dV and once for dQ, as this
            package's kernels do.

    Raises:
        TypeError, ValueError: a count that is not a positive whole number; an unknown kind or pass;
            sram_bytes that hold no row of each block; walks that are neither 1 nor 2, or 2 for
            anything but flash's backward.

    Example:
        >>> standard, flash = (
        ...     attention_cost(sequence=4096, head_dim=64, kind=kind)
        ...     for kind in ("standard", "flash")
        ... )
        >>> round(standard.moved_bytes / flash.moved_bytes, 1)
        9.3
    """
    counts = {"sequence": sequence, "head_dim": head_dim, "batch": batch, "heads": heads}
    for name, value in {**counts, "sram_bytes": sram_bytes, "dtype_bytes": dtype_bytes}.items():
        _check.whole(name, value, 1)
    _check.one_of("kind", kind, ("standard", "flash"))
    _check.one_of("pass_", pass_, ("forward", "backward"))
    _check.one_of("walks", walks, (1, 2))
    if walks == 2 and (kind, pass_) != ("flash", "backward"):
        raise ValueError(
            "walks must be 1 unless kind is 'flash' and pass_ is 'backward', got 2 with"
            f" kind={kind!r} and pass_={pass_!r}"
        )
    n, d = sequence, head_dim
    products = {"forward": 2, "backward": 4 if kind == "standard" else 3 + 2 * walks}[pass_]
    flops = products * 2 * n * n * d
    if kind == "standard":
        elements = 4 * n * n + 4 * n * d if pass_ == "forward" else 7 * n * n + 8 * n * d
        moved = elements * dtype_bytes
    else:
        tensors = 4 if pass_ == "forward" else 8  # B = M / (tensors * d)
        row_bytes = tensors * d * dtype_bytes
        blocks = -(-n // (_check.whole("sram_bytes", sram_bytes, row_bytes) // row_bytes))
        if pass_ == "forward":
            moved = (2 * n * d + 2 * n * d * blocks) * dtype_bytes + 4 * n
        elif walks == 1:
            moved = (6 * n * d + 4 * n * d * blocks) * dtype_bytes + (1 + 2 * blocks) * 4 * n
        else:
            moved = (9 * n * d + 4 * n * d * blocks) * dtype_bytes + (3 + 2 * blocks) * 4 * n
    return AttentionCost(batch * heads * flops, batch * heads * moved)
