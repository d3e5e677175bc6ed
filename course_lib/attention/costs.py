"""Costs of attention by formula: FLOPs, and bytes moved to and from the slow memory.

These formulas need no tensors. `symbolic.py` counts the memory and FLOPs of this package's own
implementation in plain torch.

FLOPs of one head with N positions of d features: a matrix product of (N, d) and (d, N), or of
(N, N) and (N, d), costs 2 N^2 d.

- forward: two matrix products, 4 N^2 d, in both kinds of attention.
- standard, backward: four matrix products (dV, dP, dQ, dK), 8 N^2 d.
- flash, backward: it also recomputes the scores, so it needs five matrix products, 10 N^2 d, if it
  iterates over the tiles once. This package's Triton kernels iterate over them twice, once for dK
  and dV and once for dQ, and compute S and dP both times: 14 N^2 d. In return, no two program
  instances write to the same place, so every run gives the same sums.

The exponentials, maxima and sums are not counted, because they are O(N^2).

Elements moved per head, if each operator reads its inputs once and writes its output once:

- standard, forward: S = Q K^T reads 2 N d and writes N^2. P = softmax(S) reads and writes N^2. O =
  P V reads N^2 + N d and writes N d. The total is 4 N^2 + 4 N d.
- standard, backward: dV = P^T dO moves N^2 + 2 N d; dP = dO V^T moves the same amount; dS = P * (dP
  - rowsum(dP * P)) moves 3 N^2; dQ = dS K and dK = dS^T Q move N^2 + 2 N d each. The total is 7
  N^2 + 8 N d.
- flash, forward: blocks of B = M / (4 d) rows of Q and of O stay on chip, where M is the number of
  elements that fit in `sram_bytes`. The other half of M holds short tiles of K, V and S. Q is read
  once. O and the log-sum-exp are written once. K and V are read once for each of N / B blocks. The
  total is 2 N d + N + 2 N d * N / B. Leading term: 8 N^2 d^2 / M.
- flash, backward: D = rowsum(dO * O) moves 2 N d + N. Blocks of B = M / (8 d) rows of K, V, dK and
  dV stay on chip and are read or written once, 4 N d. For each of N / B blocks, Q and dO are read,
  dQ is read and written, and the log-sum-exp and D are read: 4 N d + 2 N. Leading term: 32 N^2 d^2
  / M.
- flash, backward in two passes (`tile_passes=2`): the first pass is as above without dQ, so it
  moves 2 N d less per block. The second pass keeps Q, dO and dQ on chip, 3 N d. It reads the
  log-sum-exp and D once, and reads K and V for each block, 2 N d. The total of both passes is 9 N d
  + 4 N d * N / B.

Blocks are whole: B is rounded down, and N / B is rounded up. An element takes `dtype_bytes` bytes,
and each number of the log-sum-exp and of D takes four bytes. A GPU moves fewer bytes than this if
its L2 cache holds data that several blocks read, and more if it applies a mask or dropout in
separate operators.

Source: Dao et al. 2022, arXiv:2205.14135, theorem 2 (standard attention Theta(N d + N^2), flash
Theta(N^2 d^2 / M)) and appendix B; the order of the loops and the log-sum-exp are those of Dao
2023, arXiv:2307.08691.
"""

from __future__ import annotations

from dataclasses import dataclass

from course_lib import _check


@dataclass(frozen=True)
class AttentionCost:
    """FLOPs of one forward or backward pass of attention, and the bytes that it moves.

    Attributes:
        flops: Floating-point operations of the matrix products. Each multiplication and each
            addition counts as one.
        moved_bytes: Bytes read from and written to the slow memory (a GPU's HBM), as counted by
            `attention_cost`.
    """

    flops: int
    moved_bytes: int

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs per byte moved.

        If this number is below the ridge of a GPU's roofline (peak FLOP/s divided by bandwidth),
        the memory bandwidth limits the speed. Otherwise the arithmetic limits the speed.
        """
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
    tile_passes: int = 1,
) -> AttentionCost:
    """Calculate the FLOPs of a forward or backward pass of attention, and the bytes that it moves.

    The results come from formulas, which the module docstring derives. The attention is not causal
    and has as many queries as keys.

    Args:
        sequence: Number of queries, and also of keys (N in the formulas).
        head_dim: Features per head (d in the formulas).
        batch: Number of samples. The costs are multiplied by this number.
        heads: Number of heads per sample. The costs are multiplied by this number.
        kind: "standard" for attention that writes all scores to memory, or "flash" for
            FlashAttention.
        pass_: "forward" or "backward".
        sram_bytes: Bytes of fast memory that one thread block can use. The default, 163 KiB, is
            the limit on an A100. Actual kernels use less. For example, with d = 64 in half
            precision, pass 32 KiB for a kernel with blocks of 64 queries, and 64 KiB for a kernel
            with blocks of 128 queries.
        dtype_bytes: Bytes per element; 2 in half precision.
        tile_passes: Number of times that the backward pass of "flash" iterates over the tiles. It
            is 1 if one loop computes all gradients. It is 2 if one loop computes dK and dV and
            another one dQ, as in this package's Triton kernels.

    Returns:
        FLOPs and bytes of all samples and heads together.

    Raises:
        TypeError: A count is not a whole number.
        ValueError: A count is not positive, or `kind` or `pass_` is unknown. With "flash",
            `sram_bytes` is below 4 * head_dim * dtype_bytes (forward) or 8 * head_dim *
            dtype_bytes (backward). `tile_passes` is neither 1 nor 2. `tile_passes` is 2 for
            standard attention or for a forward pass.

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
    _check.one_of("tile_passes", tile_passes, (1, 2))
    if tile_passes == 2 and (kind, pass_) != ("flash", "backward"):
        raise ValueError(
            f"tile_passes must be 1 for kind={kind!r} and pass_={pass_!r}, got 2; only"
            " kind='flash' with pass_='backward' supports 2"
        )
    n, d = sequence, head_dim
    products = {"forward": 2, "backward": 4 if kind == "standard" else 3 + 2 * tile_passes}[pass_]
    flops = products * 2 * n * n * d
    if kind == "standard":
        elements = 4 * n * n + 4 * n * d if pass_ == "forward" else 7 * n * n + 8 * n * d
        moved = elements * dtype_bytes
    else:
        tensors = 4 if pass_ == "forward" else 8  # a block has B = M / (4 d) or M / (8 d) rows
        row_bytes = tensors * d * dtype_bytes
        blocks = -(-n // (_check.whole("sram_bytes", sram_bytes, row_bytes) // row_bytes))
        if pass_ == "forward":
            moved = (2 * n * d + 2 * n * d * blocks) * dtype_bytes + 4 * n
        elif tile_passes == 1:
            moved = (6 * n * d + 4 * n * d * blocks) * dtype_bytes + (1 + 2 * blocks) * 4 * n
        else:
            moved = (9 * n * d + 4 * n * d * blocks) * dtype_bytes + (3 + 2 * blocks) * 4 * n
    return AttentionCost(batch * heads * flops, batch * heads * moved)
