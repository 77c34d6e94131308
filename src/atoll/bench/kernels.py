"""Which term of an update a kernel or an operator belongs to, by explicit rules on names.

What no rule knows is not put anywhere by guess: it counts as `other` and is listed by name.

The rules, in order; the first that holds decides:

1. after the last backward of an update everything is clipping, update and mixing
2. attention, by its own name or inside an attention operator
3. our own kernels, `atoll_*`, by what they are named after
4. matrix products, by name or inside an operator of one; those of the loss too
5. the loss: passes over the logits, by name or inside the loss
6. clipping, update and mixing by name, where a program hides the backward pass
7. the model's element-wise functions, with all that is inside them
8. copies between memories, fills, views and the engine's own bookkeeping: `other`
9. element-wise work, by name
"""

import re
from collections.abc import Sequence
from typing import Literal

Term = Literal["gemm", "attention", "loss", "elementwise", "optimizer_mixing", "other"]

TERMS: tuple[Term, ...] = (
    "gemm",
    "attention",
    "loss",
    "elementwise",
    "optimizer_mixing",
    "other",
)

AFTER_BACKWARD = "after the last backward"
"""Stands in the context of what runs between the last backward and the end of an update."""

ATTENTION = re.compile(
    # Two helpers of cuDNN's backward carry no other sign of attention: dot_do_o, convert_dq.
    r"flash_?(fwd|bwd|attention|fprop|bprop)|fmha|sdpa|scaled_?dot_?product|efficient_attention"
    r"|flex_attention|dot_do_o|convert_dq|^_?atoll_attention|^_ExactAttention",
    re.IGNORECASE,
)
PRODUCT = re.compile(
    r"gemm|gemv|nvjet|xmma|cutlass|cublas|split_?k_?reduce|^triton_tem_"
    r"|^aten::(mm|bmm|addmm|addbmm|baddbmm|_?baddbmm_mkl|mv|addmv|dot|linear|matmul|einsum)_?$"
    r"|^mkldnn|^(Mm|Bmm|Addmm|Baddbmm)Backward",
    re.IGNORECASE,
)
PRODUCT_OPERATOR = re.compile(
    r"^aten::(mm|bmm|addmm|addbmm|baddbmm|linear|matmul|mv|addmv)_?$|^_Product(Backward)?$"
)
LOSS = re.compile(r"softmax|logsumexp|nll_loss|cross_entropy|^triton_(.*_)?exp(_|$)", re.IGNORECASE)
LOSS_OPERATOR = re.compile(r"_WeightedLoss|atoll::(sums_and_gradients|cross_entropy)")
OPTIMIZER = re.compile(
    r"adam|vector_norm|lp_?norm|norm_?two|norm_blocks|multi_tensor_apply"
    r"|^triton_.*_(lerp|addcdiv|addcmul|foreach)(_|$)|^aten::(lerp|addcdiv|_foreach\w*)_?$",
    re.IGNORECASE,
)
OTHER = re.compile(
    r"^[Mm]em(cpy|set)|FillFunctor"
    r"|^aten::(zero|zeros|zeros_like|ones_like|fill|empty|empty_like|empty_strided|new_empty"
    r"|new_zeros|new_tensor|full|full_like|resize|as_strided|transpose|t|mT|permute|movedim|view"
    r"|view_as|reshape|_reshape_alias|_unsafe_view|unsqueeze|squeeze|slice|narrow|select|chunk"
    r"|split|split_with_sizes|unbind|unflatten|flatten|expand|expand_as|detach|detach_|alias"
    r"|result_type|promote_types|resolve_conj|resolve_neg|lift_fresh|set|is_nonzero|item"
    r"|_local_scalar_dense|scalar_tensor|arange|to|_has_compatible_shallow_copy_type)_?$"
    r"|^detach_?$|^autograd::|^torch::autograd::|Backward\d*$|^CompiledFunction$"
    r"|^(TorchDynamo|AOTDispatcher|Pregraph|Torch-Compiled Region|PyTorch Profiler)"
)
ELEMENTWISE_OPERATOR = re.compile(
    r"^_(RmsNorm|AddNorm|SwiGlu|SplitHeads|Embed|EmbedPacked)(Backward)?$"
)
ELEMENTWISE = re.compile(
    r"elementwise_kernel|reduce_kernel|CatArrayBatchedCopy|index_?(select|put|copy|add)?_?\w*kernel"
    r"|indexSelect|indexFunc|gather|scatter|embedding|krn_partial|compute_grad_weight"
    r"|sum_and_scatter|cub::|(radix|bitonic|merge)_?sort|fill_reverse_indices|sort_postprocess"
    r"|DeviceRadix|DeviceScan|DeviceReduce|layer_?norm|rms_?norm"
    r"|^triton_(poi|red|per|for|mix)_|_for_fused_"
    # On a CPU the own time of a compiled graph is that of its generated loops; products, attention
    # and the loss are operators inside it.
    r"|^## Call CompiledFxGraph"
    r"|^aten::(add|sub|rsub|mul|div|neg|abs|pow|square|sqrt|rsqrt|reciprocal|exp|log|sum|mean|amax"
    r"|amin|max|min|maximum|minimum|all|any|silu|silu_backward|sigmoid|sigmoid_backward|cat|stack"
    r"|where|index|index_select|index_put|_index_put_impl|index_add|gather|scatter|masked_fill"
    r"|embedding|embedding_backward|embedding_dense_backward|copy|_to_copy|clone|contiguous|clamp"
    r"|addcmul|isfinite|eq|ne|lt|le|gt|ge|bitwise_and|bitwise_not|bitwise_or|logical_and"
    r"|logical_not|__and__|repeat_interleave|repeat|tril|triu|cumsum|pad|constant_pad_nd)_?$",
    re.IGNORECASE,
)
OURS = re.compile(r"^_?atoll_")
OURS_LOSS = re.compile(r"^_?atoll_cross_entropy")
OURS_OPTIMIZER = re.compile(r"^_?atoll_(adamw|norm_blocks|mix|clip)")


def term_of(name: str, context: Sequence[str] = ()) -> Term | None:
    """Return the term of a kernel or an operator, None where no rule knows it.

    Args:
        name: Of the kernel on a device, or of the operator on a CPU.
        context: Operators around it on the host, and AFTER_BACKWARD where that holds.
    """
    if AFTER_BACKWARD in context:
        return "optimizer_mixing"
    if ATTENTION.search(name) or any(map(ATTENTION.search, context)):
        return "attention"
    if OURS.search(name):
        if OURS_LOSS.search(name):
            return "loss"
        return "optimizer_mixing" if OURS_OPTIMIZER.search(name) else "elementwise"
    if PRODUCT.search(name) or any(map(PRODUCT_OPERATOR.search, (name, *context))):
        return "gemm"
    if LOSS.search(name) or any(map(LOSS_OPERATOR.search, (name, *context))):
        return "loss"
    if OPTIMIZER.search(name):
        return "optimizer_mixing"
    if any(map(ELEMENTWISE_OPERATOR.search, (name, *context))):
        return "elementwise"
    if OTHER.search(name):
        return "other"
    if ELEMENTWISE.search(name):
        return "elementwise"
    return None
