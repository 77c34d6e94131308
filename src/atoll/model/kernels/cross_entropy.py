"""Cross-entropy of each row of logits, whose gradient takes the logits' place in memory.

Twin: `atoll.model.loss._traced_softmax`.

Shapes: R rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_BLOCK = 8192


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
    block = min(LARGEST_BLOCK, triton.next_power_of_2(vocabulary))
    atoll_cross_entropy[(rows,)](
        logits_RV,
        ids_R,
        weights_R,
        losses_R,
        VOCABULARY=vocabulary,
        BLOCK=block,
        WITH_GRAD=with_grad,
        num_warps=max(1, min(16, block // 512)),
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
    row = tl.program_id(0).to(tl.int64)
    logits_V = logits_RV + row * VOCABULARY
    columns = tl.arange(0, BLOCK)
    # One statistics pass over memory; the second pass finds the row in a cache.
    largest_B = tl.full([BLOCK], float("-inf"), tl.float32)
    sum_B = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        inside = start + columns < VOCABULARY
        x = tl.load(logits_V + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        larger_B = tl.maximum(largest_B, x)
        # exp(-inf - -inf) is not a number; columns beyond the vocabulary stay at zero.
        seen = larger_B > float("-inf")
        kept = tl.where(seen, tl.exp(largest_B - larger_B), 0.0)
        sum_B = sum_B * kept + tl.where(seen, tl.exp(x - larger_B), 0.0)
        largest_B = larger_B
    largest = tl.max(largest_B, axis=0)
    total = tl.sum(sum_B * tl.exp(largest_B - largest), axis=0)
    normalizer = largest + tl.log(total)
    target = tl.load(ids_R + row)
    chosen = tl.load(logits_V + target).to(tl.float32)
    tl.store(losses_R + row, normalizer - chosen)
    if WITH_GRAD:
        weight = tl.load(weights_R + row)
        tl.debug_barrier()  # every thread has read its target's logit before one overwrites it
        for start in range(0, VOCABULARY, BLOCK):
            at = start + columns
            inside = at < VOCABULARY
            x = tl.load(logits_V + at, mask=inside, other=0.0).to(tl.float32)
            p = tl.exp(x - normalizer) - tl.where(at == target, 1.0, 0.0)
            tl.store(logits_V + at, (p * weight).to(logits_RV.dtype.element_ty), mask=inside)
