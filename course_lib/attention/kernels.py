"""Flash attention in Triton: one kernel for forward, three for backward.

`launch.py` chooses block sizes and starts these kernels; `tiled.py` has the same algorithm in plain
torch. A launch of a kernel runs many program instances. Each of them keeps one block of rows, which
it loads once, and iterates over the other operand tile by tile. Scores exist only one tile at a
time, on the chip: no matrix of n_q x n_k numbers is ever written to memory.

    kernel                    keeps              iterates over      writes
    forward_kernel            block of queries   keys and values    O and the log-sum-exp
    rows_kernel               block of queries                      D = rowsum(dO * O)
    keys_backward_kernel      block of keys      queries            dK and dV
    queries_backward_kernel   block of queries   keys and values    dQ

Both backward kernels compute the attention weights again, P = exp(scale * Q K^T - lse). Then, with
dP = dO V^T,

    dV = P^T dO        dS = P * (dP - D)        dQ = scale * dS K        dK = scale * dS^T Q

A GPU has an instruction for 2^x and none for e^x. The kernels therefore compute exp(x) as
2^(x * log2(e)), with log2(e) multiplied into the scale. They do not use their argument
`tuning_key`, which only the tuner in `launch` reads.

Lengths need not be multiples of the block sizes: the last tile of a length is loaded, computed and
stored with a mask. Nothing is padded except the two work arrays of backward (see `rows_kernel`).

The kernels have 12 to 27 parameters. The strides of each tensor are one parameter, a tuple. A
tensor and its strides are separate parameters, because Triton's tuner distinguishes dtypes only by
arguments that have a `dtype` themselves (`triton.runtime.autotuner`). If tensors were packed into
tuples, the tuner would use settings that were tuned for another dtype. The sizes are also separate
parameters, so that each kernel's signature lists everything that it uses.

Source: Dao 2023, arXiv:2307.08691, algorithms 1 and 2, except that dQ has a separate kernel. No two
instances then write to the same place, so no atomic additions are needed and every run gives the
same bits. In return, the backward pass has 7 matrix products, where algorithm 2 has 5, because both
kernels need Q K^T and dO V^T.
"""

from __future__ import annotations

import math

try:
    import triton
    import triton.language as tl
# This module can also be imported without Triton, so that `launch.unsupported_reason` can return
# that Triton is not installed.
except ImportError:
    triton = tl = None

jit = triton.jit if triton else lambda function: function
# Whether TRITON_INTERPRET=1 was in the environment when Triton was imported. In this case Triton
# does not compile its own functions either.
INTERPRETED = triton is not None and not isinstance(tl.sum, triton.JITFunction)
# A kernel may read a global variable only if it is a constant of this type.
constant = tl.constexpr if triton else float
WIDEN = constant(INTERPRETED)  # whether `product` converts its operands to fp32
LOG2_E = constant(math.log2(math.e))
LN_2 = constant(math.log(2))


# ---- functions that the kernels share; each is inlined where it is called


@jit
def tile_of(
    tensor,
    strides,
    batch,
    head,
    first,
    n,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return pointers to the entries of a tile, and a mask of the entries inside the tensor.

    The tensor has the shape (batches, heads, n, D) and the given strides. The tile consists of the
    rows `first` to `first + BLOCK - 1` of the head [batch, head]. Both results have the shape
    (BLOCK, BLOCK_D), where BLOCK_D is D rounded up to a power of two, as Triton requires. The mask
    is True for an entry if its row is below n and its column is below D.
    """
    # The offset of a head is computed in 64 bits, because it may exceed 2^31. Offsets within a head
    # are computed in 32 bits, and `launch` copies tensors for which these are not enough.
    start = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    within = (first + rows)[:, None] * strides[2] + columns[None, :] * strides[3]
    return tensor + start + within, (first + rows < n)[:, None] & (columns < D)[None, :]


@jit
def load_tile(
    tensor, strides, batch, head, first, n,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr = False,
):  # fmt: skip
    """Load a tile of shape (BLOCK, BLOCK_D) from a tensor of shape (batches, heads, n, D).

    The tile begins at row `first` of the head [batch, head]. Entries outside the tensor are zero.
    BLOCK_D is D rounded up to a power of two. If the caller knows that all rows of the tile are
    inside the tensor, it sets WHOLE, and the load then needs no mask for rows.
    """
    pointers, exists = tile_of(tensor, strides, batch, head, first, n, D, BLOCK, BLOCK_D)
    if WHOLE and D == BLOCK_D:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=exists, other=0.0)


@jit
def store_tile(
    tile,
    tensor,
    strides,
    batch,
    head,
    first,
    n,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store a tile of shape (BLOCK, BLOCK_D) in a tensor of shape (batches, heads, n, D).

    The tile begins at row `first` of the head [batch, head]. BLOCK_D is D rounded up to a power of
    two. Entries outside the tensor are not stored.
    """
    pointers, exists = tile_of(tensor, strides, batch, head, first, n, D, BLOCK, BLOCK_D)
    tl.store(pointers, tile.to(tensor.dtype.element_ty), mask=exists)


@jit
def row_offset(batch, head, heads, n):
    """Return the offset of element [batch, head, 0] in a contiguous tensor (batches, heads, n)."""
    return (tl.cast(batch, tl.int64) * heads + head) * n


@jit
def product(a, b, accumulator=None):
    """Return the matrix product of a and b in fp32, plus `accumulator` if it is not None."""
    if WIDEN:
        # Triton's interpreter would multiply the bits of bf16 numbers as if they were integers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    # Without "ieee" a GPU rounds fp32 operands to TF32, which keeps 10 of 23 bits, and gradients
    # become visibly inaccurate. "ieee" is slower. It does not affect fp16 and bf16, because the
    # product of two 16-bit numbers is exact in fp32.
    return tl.dot(a, b, accumulator, input_precision="ieee")


@jit
def last_key(queries, n_k, shift, CAUSAL: tl.constexpr):
    """Return, for each query, the index of the last key to which the query attends.

    There are n_k keys. Without CAUSAL, each query attends to all of them, so the result is n_k - 1.
    With CAUSAL, query i attends to keys up to i + shift, so the result is the smaller of i + shift
    and n_k - 1.
    """
    return tl.minimum(queries + shift, n_k - 1) if CAUSAL else tl.zeros_like(queries) + n_k - 1


@jit
def key_range(
    first_q, n_k, shift, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Return (inner, end), the boundaries of three ranges of keys, for a block of queries.

    The block has BLOCK_Q queries, starting at `first_q`. A tile has BLOCK_K keys. If CAUSAL, query
    i attends to keys up to i + shift. The three ranges are:

    - Keys before `inner`: whole tiles, to which every query of the block attends.
    - Keys from `inner` to `end` (exclusive): tiles that need a mask.
    - Keys from `end` on: no query of the block attends to them.
    """
    if CAUSAL:
        seen_by_first = tl.minimum(tl.maximum(first_q + 1 + shift, 0), n_k)
        seen_by_last = tl.minimum(tl.maximum(first_q + BLOCK_Q + shift, 0), n_k)
        return seen_by_first // BLOCK_K * BLOCK_K, seen_by_last
    else:
        return n_k // BLOCK_K * BLOCK_K, n_k


@jit
def query_range(
    first_k, n_q, shift, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Return (start, inner, outer), the boundaries of four ranges of queries, for a block of keys.

    The block has BLOCK_K keys, starting at `first_k`. A tile has BLOCK_Q queries. If CAUSAL, query
    i attends to keys up to i + shift. The four ranges are:

    - Queries before `start`: they attend to no key of the block.
    - Queries from `start` to `inner` (exclusive): tiles that need a mask.
    - Queries from `inner` to `outer` (exclusive): whole tiles, which attend to all keys of the
      block.
    - Queries from `outer` on, if there are any: a tile that needs a mask.

    The last block of keys may extend past the end of the sequence. These extra keys need no mask,
    because they only affect their own rows of dK and dV, which are not stored.
    """
    start, inner, outer = 0, 0, n_q // BLOCK_Q * BLOCK_Q
    if CAUSAL:
        first_seeing_one = tl.minimum(tl.maximum(first_k - shift, 0), n_q)
        first_seeing_all = tl.minimum(tl.maximum(first_k + BLOCK_K - 1 - shift, 0), n_q)
        start = first_seeing_one // BLOCK_Q * BLOCK_Q
        inner = tl.cdiv(first_seeing_all, BLOCK_Q) * BLOCK_Q
    return start, inner, tl.maximum(inner, outer)


# ---- forward


@jit
def forward_kernel(
    q,
    k,
    v,
    o,
    lse,
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    n_q,
    n_k,
    shift,
    group,
    scale_log2,
    tuning_key,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute the output o of attention and the log-sum-exp lse of each row of scores.

    One program instance handles BLOCK_Q queries of one head. If CAUSAL, query i attends to keys up
    to i + shift. `group` is the number of query heads per key-value head, and `scale_log2` is the
    scale of the scores times log2(e). Only Triton's tuner reads `tuning_key`.

    Reads:   q (BLOCK_Q, D) once; k and v (n_k, D) in tiles (BLOCK_K, D), up to the diagonal if
             causal.
    Writes:  o (BLOCK_Q, D) and lse (BLOCK_Q,), once, at the end.
    On chip: the queries and one tile of keys and of values; scores and weights (BLOCK_Q, BLOCK_K);
             in fp32 the running output (BLOCK_Q, D), maximum (BLOCK_Q,) and sum (BLOCK_Q,).
    """
    # With a causal mask, later queries attend to more keys. Their long loops start first, so that
    # the short loops run at the end, which keeps all processors of the GPU busy.
    first_q = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    head, batch = tl.program_id(1), tl.program_id(2)
    kv_head = head // group
    query = load_tile(q, q_strides, batch, head, first_q, n_q, D, BLOCK_Q, BLOCK_D)
    rows = first_q + tl.arange(0, BLOCK_Q)
    last = last_key(rows, n_k, shift, CAUSAL)

    out = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    largest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)

    inner, end = key_range(first_q, n_k, shift, CAUSAL, BLOCK_Q, BLOCK_K)
    # The compiler unrolls this into one loop over tiles without a mask, and one over masked tiles.
    for MASKED in tl.static_range(2):
        for first_k in tl.range(
            inner if MASKED else 0,
            end if MASKED else inner,
            BLOCK_K,
            num_stages=1 if MASKED else None,
        ):
            key = load_tile(
                k, k_strides, batch, kv_head, first_k, n_k, D, BLOCK_K, BLOCK_D, MASKED == 0
            )
            value = load_tile(
                v, v_strides, batch, kv_head, first_k, n_k, D, BLOCK_K, BLOCK_D, MASKED == 0
            )
            scores = product(query, tl.trans(key))  # (BLOCK_Q, BLOCK_K), not scaled yet
            if MASKED:
                columns = first_k + tl.arange(0, BLOCK_K)
                scores = tl.where(columns[None, :] <= last[:, None], scores, float("-inf"))

            new_largest = tl.maximum(largest, tl.max(scores, 1) * scale_log2)
            # The maximum of a row without any key so far is -inf. For such a row, 0 is subtracted
            # instead, because -inf - -inf is NaN.
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            # Scaling and subtraction are one expression, which the compiler fuses into one
            # instruction.
            weights = tl.exp2(scores * scale_log2 - base[:, None])
            rescale = tl.exp2(largest - base)  # adapts the old sums to the new maximum
            total = total * rescale + tl.sum(weights, 1)
            out = product(weights.to(value.dtype), value, out * rescale[:, None])
            largest = new_largest

    # A row without keys gets o = 0 / 1 = 0 and lse = -inf + log2(1) = -inf.
    total = tl.where(total == 0.0, 1.0, total)
    store_tile(out / total[:, None], o, o_strides, batch, head, first_q, n_q, D, BLOCK_Q, BLOCK_D)
    offset = row_offset(batch, head, tl.num_programs(1), n_q)
    tl.store(lse + offset + rows, (largest + tl.log2(total)) * LN_2, mask=rows < n_q)


# ---- backward


@jit
def rows_kernel(
    grad_o, o, lse, row_dots, lse_log2,
    grad_o_strides, o_strides,
    n_q, padded_q,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Compute the two numbers per query that both backward kernels need, row_dots and lse_log2.

    One program instance handles BLOCK_Q queries of one head. Both results have padded_q numbers per
    head. padded_q is a multiple of every block size, so the results can be read without a mask.

    Reads:   grad_o and o (BLOCK_Q, D), lse (BLOCK_Q,).
    Writes:  row_dots (BLOCK_Q,) = rowsum(grad_o * o), which the gradient of softmax subtracts from
             the gradient of every weight in a row;
             lse_log2 (BLOCK_Q,) = lse * log2(e), the log-sum-exp to the base 2.
    On chip: the tiles of grad_o and o.
    """
    first_q, head, batch = tl.program_id(0) * BLOCK_Q, tl.program_id(1), tl.program_id(2)
    rows = first_q + tl.arange(0, BLOCK_Q)
    grad = load_tile(grad_o, grad_o_strides, batch, head, first_q, n_q, D, BLOCK_Q, BLOCK_D)
    out = load_tile(o, o_strides, batch, head, first_q, n_q, D, BLOCK_Q, BLOCK_D)
    dots = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    offset = row_offset(batch, head, tl.num_programs(1), padded_q)
    tl.store(row_dots + offset + rows, dots)
    # For a row without keys, and for a row of padding, +inf makes the weights zero.
    sums = tl.load(
        lse + row_offset(batch, head, tl.num_programs(1), n_q) + rows,
        mask=rows < n_q,
        other=float("-inf"),
    )
    tl.store(lse_log2 + offset + rows, tl.where(sums == float("-inf"), float("inf"), sums * LOG2_E))


@jit
def keys_backward_kernel(
    q,
    k,
    v,
    grad_o,
    lse_log2,
    row_dots,
    grad_k,
    grad_v,
    q_strides,
    k_strides,
    v_strides,
    grad_o_strides,
    grad_k_strides,
    grad_v_strides,
    n_q,
    padded_q,
    n_k,
    shift,
    group,
    scale,
    scale_log2,
    tuning_key,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute the gradients of keys and values, grad_k and grad_v.

    One program instance handles BLOCK_K keys of one key-value head. It sums over the `group` query
    heads that share these keys. `grad_o` is the gradient of the output, and `scale` multiplies the
    scores. `rows_kernel` computes `lse_log2` and `row_dots`, which have padded_q numbers per head.
    All other arguments are the same as in `forward_kernel`.

    Reads:   k and v (BLOCK_K, D) once; for each of `group` query heads, q and grad_o (n_q, D) in
             tiles (BLOCK_Q, D), and lse_log2 and row_dots (n_q,) in blocks (BLOCK_Q,). If causal,
             q, grad_o, lse_log2 and row_dots are read only from the diagonal to the last query.
    Writes:  grad_k and grad_v (BLOCK_K, D), once, at the end.
    On chip: the keys and values, one tile of queries and of output gradients; the attention
             weights, the gradients of the weights and the gradients of the scores (BLOCK_K,
             BLOCK_Q); in fp32 the running grad_k and grad_v (BLOCK_K, D).
    """
    first_k, kv_head, batch = tl.program_id(0) * BLOCK_K, tl.program_id(1), tl.program_id(2)
    key = load_tile(k, k_strides, batch, kv_head, first_k, n_k, D, BLOCK_K, BLOCK_D)
    value = load_tile(v, v_strides, batch, kv_head, first_k, n_k, D, BLOCK_K, BLOCK_D)
    columns = first_k + tl.arange(0, BLOCK_K)

    key_grad = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    value_grad = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)

    start, inner, outer = query_range(first_k, n_q, shift, CAUSAL, BLOCK_Q, BLOCK_K)
    for head in range(kv_head * group, (kv_head + 1) * group):
        offset = row_offset(batch, head, tl.num_programs(1) * group, padded_q)
        for MASKED in tl.static_range(2):
            begin, end = (start, n_q - (outer - inner)) if MASKED else (inner, outer)
            for first_q in tl.range(begin, end, BLOCK_Q, num_stages=1 if MASKED else None):
                if MASKED:  # skip the tiles without a mask, which are between the masked tiles
                    first_q = tl.where(first_q < inner, first_q, first_q + (outer - inner))
                rows = first_q + tl.arange(0, BLOCK_Q)
                query = load_tile(
                    q, q_strides, batch, head, first_q, n_q, D, BLOCK_Q, BLOCK_D, MASKED == 0
                )
                out_grad = load_tile(
                    grad_o,
                    grad_o_strides,
                    batch,
                    head,
                    first_q,
                    n_q,
                    D,
                    BLOCK_Q,
                    BLOCK_D,
                    MASKED == 0,
                )

                # Tiles are transposed, with keys as rows and queries as columns, so that the sums
                # over queries are plain matrix products.
                scores = product(key, tl.trans(query))  # (BLOCK_K, BLOCK_Q), not scaled yet
                scores = scores * scale_log2 - tl.load(lse_log2 + offset + rows)[None, :]
                if MASKED and CAUSAL:
                    scores = tl.where(
                        columns[:, None] <= rows[None, :] + shift, scores, float("-inf")
                    )
                weights = tl.exp2(scores)
                weight_grads = product(value, tl.trans(out_grad))
                score_grads = weights * (weight_grads - tl.load(row_dots + offset + rows)[None, :])
                # value_grad and key_grad are updated last. If value_grad were updated directly
                # after the computation of `weights`, the kernel would run out of registers on an
                # H100.
                value_grad = product(weights.to(out_grad.dtype), out_grad, value_grad)
                key_grad = product(score_grads.to(query.dtype), query, key_grad)

    store_tile(
        key_grad * scale, grad_k, grad_k_strides, batch, kv_head, first_k, n_k, D, BLOCK_K, BLOCK_D
    )
    store_tile(
        value_grad, grad_v, grad_v_strides, batch, kv_head, first_k, n_k, D, BLOCK_K, BLOCK_D
    )


@jit
def queries_backward_kernel(
    q,
    k,
    v,
    grad_o,
    lse_log2,
    row_dots,
    grad_q,
    q_strides,
    k_strides,
    v_strides,
    grad_o_strides,
    grad_q_strides,
    n_q,
    padded_q,
    n_k,
    shift,
    group,
    scale,
    scale_log2,
    tuning_key,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute the gradient of the queries, grad_q.

    One program instance handles BLOCK_Q queries of one head. `grad_o` is the gradient of the
    output, and `scale` multiplies the scores. `rows_kernel` computes `lse_log2` and `row_dots`,
    which have padded_q numbers per head. All other arguments are the same as in `forward_kernel`.

    Reads:   q and grad_o (BLOCK_Q, D), lse_log2 and row_dots (BLOCK_Q,), once; k and v (n_k, D) in
             tiles (BLOCK_K, D), up to the diagonal if causal.
    Writes:  grad_q (BLOCK_Q, D), once, at the end.
    On chip: the queries and output gradients, one tile of keys and of values; the attention
             weights, the gradients of the weights and the gradients of the scores (BLOCK_Q,
             BLOCK_K); in fp32 the running grad_q (BLOCK_Q, D).
    """
    # The longest loops start first, as in the forward kernel.
    first_q = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    head, batch = tl.program_id(1), tl.program_id(2)
    kv_head = head // group
    query = load_tile(q, q_strides, batch, head, first_q, n_q, D, BLOCK_Q, BLOCK_D)
    out_grad = load_tile(grad_o, grad_o_strides, batch, head, first_q, n_q, D, BLOCK_Q, BLOCK_D)
    rows = first_q + tl.arange(0, BLOCK_Q)
    last = last_key(rows, n_k, shift, CAUSAL)
    offset = row_offset(batch, head, tl.num_programs(1), padded_q)
    sums, dots = tl.load(lse_log2 + offset + rows), tl.load(row_dots + offset + rows)

    query_grad = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)

    inner, end = key_range(first_q, n_k, shift, CAUSAL, BLOCK_Q, BLOCK_K)
    for MASKED in tl.static_range(2):
        for first_k in tl.range(
            inner if MASKED else 0,
            end if MASKED else inner,
            BLOCK_K,
            num_stages=1 if MASKED else None,
        ):
            key = load_tile(
                k, k_strides, batch, kv_head, first_k, n_k, D, BLOCK_K, BLOCK_D, MASKED == 0
            )
            value = load_tile(
                v, v_strides, batch, kv_head, first_k, n_k, D, BLOCK_K, BLOCK_D, MASKED == 0
            )
            scores = product(query, tl.trans(key))  # (BLOCK_Q, BLOCK_K), not scaled yet
            scores = scores * scale_log2 - sums[:, None]
            if MASKED:
                columns = first_k + tl.arange(0, BLOCK_K)
                scores = tl.where(columns[None, :] <= last[:, None], scores, float("-inf"))
            weights = tl.exp2(scores)
            weight_grads = product(out_grad, tl.trans(value))
            score_grads = weights * (weight_grads - dots[:, None])
            query_grad = product(score_grads.to(key.dtype), key, query_grad)

    store_tile(
        query_grad * scale, grad_q, grad_q_strides, batch, head, first_q, n_q, D, BLOCK_Q, BLOCK_D
    )
