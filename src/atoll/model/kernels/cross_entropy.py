"""Cross-entropy of each row of logits, whose gradient takes the logits' place in memory.

Twin: `atoll.model.loss._traced_softmax`.

Shapes: R rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


def cross_entropy(
    logits_RV: Tensor, ids_R: Tensor, weights_R: Tensor, *, with_grad: bool
) -> Tensor:
    """Return float32 cross-entropies [R] in nats; each row counts as itself, without its weight.

    Args:
        logits_RV: bfloat16, contiguous; with `with_grad` overwritten by the gradient of the
            weighted sum of cross-entropies.
        ids_R: int64 targets, all inside the vocabulary.
        weights_R: float32 weight of each target.
        with_grad: Whether the gradient is wanted.
    """
    rows, vocabulary = logits_RV.shape
    losses_R = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    atoll_cross_entropy[(rows,)](
        logits_RV,
        ids_R.contiguous(),  # one row of each of several models, flattened, is strided
        weights_R.contiguous(),
        losses_R,
        VOCABULARY=vocabulary,
        BLOCK=block,
        WITH_GRAD=with_grad,
        num_warps=max(1, min(WARPS, block // 256)),
    )
    return losses_R


@triton.jit
def atoll_cross_entropy(
    logits_RV,
    ids_R,
    weights_R,
    losses_R,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    WITH_GRAD: tl.constexpr,
):
    # A row is read from memory once; the later passes find it in a cache, which the hints keep free
    # for it. Rows kept in registers instead leave a multiprocessor too few threads: 40% slower.
    row = tl.program_id(0).to(tl.int64)
    logits_V = logits_RV + row * VOCABULARY
    columns = tl.arange(0, BLOCK)
    largest_B = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        inside = start + columns < VOCABULARY
        at = logits_V + start + columns
        x = tl.load(at, mask=inside, other=float("-inf"), eviction_policy="evict_last")
        largest_B = tl.maximum(largest_B, x.to(tl.float32))
    largest = tl.max(largest_B, axis=0)
    sum_B = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        inside = start + columns < VOCABULARY
        at = logits_V + start + columns
        x = tl.load(at, mask=inside, other=float("-inf"), eviction_policy="evict_last")
        sum_B += tl.exp(x.to(tl.float32) - largest)
    total = tl.sum(sum_B, axis=0)
    target = tl.load(ids_R + row)
    chosen = tl.load(logits_V + target).to(tl.float32)
    tl.store(losses_R + row, largest + tl.log(total) - chosen)
    if WITH_GRAD:
        weight = tl.load(weights_R + row)
        scale = weight / total
        tl.debug_barrier()  # nobody overwrites the target's logit before everybody has read it
        for start in range(0, VOCABULARY, BLOCK):
            at = start + columns
            inside = at < VOCABULARY
            x = tl.load(logits_V + at, mask=inside, other=0.0, eviction_policy="evict_first")
            grad = tl.exp(x.to(tl.float32) - largest) * scale - tl.where(at == target, weight, 0.0)
            grad = grad.to(logits_RV.dtype.element_ty)
            tl.store(logits_V + at, grad, mask=inside, eviction_policy="evict_first")
