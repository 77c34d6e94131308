"""Gradients of embedding rows, added up in one fixed order and straight into the arena.

Twin: `index_add_` of the rows' gradients.

Equal ids lie together once they are sorted. Each program adds up the runs of equal ids in its
stretch of the sorted list; a run that crosses into the next stretch leaves partial sums, which the
program of the stretch it begins in adds up afterwards.

Shapes: N local models, M tokens of each, R = N * M, V vocabulary, D width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

STRETCH = 32
"""Sorted rows of one program."""


def add_rows(sink_NVD: Tensor, ids_NM: Tensor, grad_NMD: Tensor) -> None:
    """Add each token's gradient to the row of its id, in its own model.

    Args:
        sink_NVD: float32, [V, D] of each model contiguous.
        ids_NM: int64 ids inside the vocabulary.
        grad_NMD: float32 or bfloat16, contiguous.
    """
    models, vocabulary, width = sink_NVD.shape
    first_N1 = torch.arange(models, device=ids_NM.device).unsqueeze(1) * vocabulary
    keys_R, order_R = torch.sort((ids_NM + first_N1).reshape(-1), stable=True)
    rows = keys_R.numel()
    stretches = triton.cdiv(rows, STRETCH)
    partial_G2D = sink_NVD.new_empty(stretches, 2, width)
    block = triton.next_power_of_2(width)
    shared = (sink_NVD, sink_NVD.stride(0), keys_R, partial_G2D, rows, vocabulary)
    sizes = {"WIDTH": width, "BLOCK": block, "STRETCH": STRETCH}
    warps = max(1, min(4, block // 256))
    atoll_embedding_runs[(stretches,)](*shared, order_R, grad_NMD, **sizes, num_warps=warps)
    atoll_embedding_seams[(stretches,)](*shared, **sizes, num_warps=warps)


@triton.jit
def atoll_embedding_runs(
    sink_NVD,
    model_stride,
    keys_R,
    partial_G2D,
    num_rows,
    vocabulary,
    order_R,
    grad_RD,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STRETCH: tl.constexpr,
):
    stretch = tl.program_id(0).to(tl.int64)
    base = stretch * STRETCH
    columns = tl.arange(0, BLOCK)
    in_width = columns < WIDTH
    key = tl.load(keys_R + base)
    before = tl.load(keys_R + base - 1, mask=base > 0, other=-1)
    continued = before == key  # the run in hand began in an earlier stretch
    run_D = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(STRETCH):
        at = base + i
        inside = at < num_rows
        next_key = tl.load(keys_R + at, mask=inside, other=-1)
        row = tl.load(order_R + at, mask=inside, other=0)
        grad_D = tl.load(grad_RD + row * WIDTH + columns, mask=in_width & inside, other=0.0)
        grad_D = grad_D.to(tl.float32)
        ends = next_key != key
        _put(
            sink_NVD,
            model_stride,
            key,
            vocabulary,
            columns,
            in_width & ends & ~continued,
            run_D,
            WIDTH,
        )
        place = partial_G2D + stretch * 2 * WIDTH + columns
        tl.store(place, run_D, mask=in_width & ends & continued)
        continued = continued & ~ends
        run_D = tl.where(ends, grad_D, run_D + grad_D)
        key = next_key
    after = tl.load(keys_R + base + STRETCH, mask=base + STRETCH < num_rows, other=-1)
    goes_on = (after == key) & (key >= 0)
    complete = (key >= 0) & ~goes_on & ~continued
    _put(sink_NVD, model_stride, key, vocabulary, columns, in_width & complete, run_D, WIDTH)
    # Slot 0: the end of a run from before, or all of a stretch inside one. Slot 1: its beginning.
    place = partial_G2D + (stretch * 2 + tl.where(continued, 0, 1)) * WIDTH + columns
    tl.store(place, run_D, mask=in_width & (key >= 0) & (continued | goes_on))


@triton.jit
def atoll_embedding_seams(
    sink_NVD,
    model_stride,
    keys_R,
    partial_G2D,
    num_rows,
    vocabulary,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STRETCH: tl.constexpr,
):
    stretch = tl.program_id(0).to(tl.int64)
    end = (stretch + 1) * STRETCH
    columns = tl.arange(0, BLOCK)
    in_width = columns < WIDTH
    key = tl.load(keys_R + end - 1, mask=end < num_rows, other=-1)
    before = tl.load(keys_R + end - STRETCH - 1, mask=stretch > 0, other=-1)
    after = tl.load(keys_R + end, mask=end < num_rows, other=-2)
    begins = (after == key) & (before != key)  # a run begins here and crosses the end
    place = partial_G2D + (stretch * 2 + 1) * WIDTH + columns
    run_D = tl.load(place, mask=in_width & begins, other=0.0)
    after = tl.where(begins, after, -2)
    follower = stretch + 1
    while after == key:
        run_D += tl.load(partial_G2D + follower * 2 * WIDTH + columns, mask=in_width, other=0.0)
        follower += 1
        at = follower * STRETCH
        after = tl.load(keys_R + at, mask=at < num_rows, other=-2)
    _put(sink_NVD, model_stride, key, vocabulary, columns, in_width & begins, run_D, WIDTH)


@triton.jit
def _put(sink_NVD, model_stride, key, vocabulary, columns, mask, run_D, WIDTH: tl.constexpr):
    place = sink_NVD + key // vocabulary * model_stride + key % vocabulary * WIDTH + columns
    tl.store(place, tl.load(place, mask=mask, other=0.0) + run_D, mask=mask)
