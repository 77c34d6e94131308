"""Names to terms, and made-up traces whose times are known."""

import pytest

from atoll.bench.kernels import AFTER_BACKWARD, TERMS, term_of
from atoll.bench.kernels_trace import UPDATE, by_term, read_timeline
from atoll.bench.roofs import Roofs, against_floors, floors
from atoll.bench.throughput_table import table
from atoll.config.model import ModelConfig
from atoll.errors import AtollError
from atoll.model.cost import update_parts

NATIVE = "void at::native::"
KERNELS = {
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN": "gemm",
    "sm90_xmma_gemm_bf16f32_bf16f32_f32_tn_n_tilesize128x128x64_cublas": "gemm",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_nn_align8>": "gemm",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "gemm",
    "triton_tem_fused_bmm_3": "gemm",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::x>>": "attention",
    "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64>>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3": "attention",
    "void cudnn::fusion::compute_dot_do_o_specialized<true>": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": "attention",
    "atoll_cross_entropy": "loss",
    "triton_red_fused__to_copy_logsumexp_0": "loss",
    "triton_poi_fused__to_copy_eq_exp_sub_3": "loss",
    f"{NATIVE}(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>": "loss",
    "atoll_adamw": "optimizer_mixing",
    "atoll_norm_blocks": "optimizer_mixing",
    f"{NATIVE}(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<4>>": (
        "optimizer_mixing"
    ),
    f"{NATIVE}reduce_kernel<512, 1, ReduceOp<float, NormTwoOps<float, float>, 4>>": (
        "optimizer_mixing"
    ),
    "atoll_add_norm": "elementwise",
    "atoll_add_norm_backward": "elementwise",
    "atoll_swiglu_backward": "elementwise",
    "atoll_rotary": "elementwise",
    "atoll_embedding_runs": "elementwise",
    "atoll_attention_backward": "attention",
    f"{NATIVE}bitonicSortKVInPlace<2, -1, 16, 16, long, long>": "elementwise",
    "triton_poi_fused_mul_silu_split_5": "elementwise",
    "triton_red_fused_add_mean_mul_pow_rsqrt_2": "elementwise",
    f"{NATIVE}vectorized_elementwise_kernel<4, BinaryFunctor<float, MulFunctor>>": "elementwise",
    f"{NATIVE}(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2>": "elementwise",
    f"{NATIVE}vectorized_elementwise_kernel<4, FillFunctor<float>>": "other",
    "Memcpy DtoH (Device -> Pinned)": "other",
    "Memset (Device)": "other",
    "aten::bmm": "gemm",
    "aten::linear": "gemm",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "aten::_softmax": "loss",
    "aten::_fused_adamw_": "optimizer_mixing",
    "aten::linalg_vector_norm": "optimizer_mixing",
    "aten::silu_backward": "elementwise",
    "aten::embedding_dense_backward": "elementwise",
    "_RmsNormBackward": "elementwise",
    "## Call CompiledFxGraph fyqoefwm4ydbtqtdp2sneoqmjj ##": "elementwise",
    "Torch-Compiled Region: 0/0": "other",
    "aten::as_strided": "other",
    "autograd::engine::evaluate_function: MmBackward0": "other",
    "SliceBackward0": "other",
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_known_name_has_its_term(name):
    assert term_of(name) == KERNELS[name]


@pytest.mark.parametrize("name", ["my_new_kernel<float>", "aten::brand_new_op", ""])
def test_a_name_that_no_rule_knows_is_put_nowhere(name):
    assert term_of(name) is None


GENERIC = f"{NATIVE}elementwise_kernel<128, 4, direct_copy_kernel_cuda>"


@pytest.mark.parametrize(
    ("name", "context", "term"),
    [
        (GENERIC, (), "elementwise"),
        (GENERIC, ("_WeightedLoss",), "loss"),
        (GENERIC, ("aten::bmm",), "gemm"),
        (GENERIC, (AFTER_BACKWARD,), "optimizer_mixing"),
        ("nvjet_tst_128x256", ("_WeightedLoss",), "gemm"),
        ("nvjet_tst_128x256", (AFTER_BACKWARD,), "optimizer_mixing"),
        ("aten::bmm", ("aten::_scaled_dot_product_attention_math",), "attention"),
        ("aten::_softmax", ("aten::_scaled_dot_product_attention_math",), "attention"),
        ("aten::empty", ("_SwiGlu",), "elementwise"),
        (GENERIC, ("_ExactAttentionBackward",), "attention"),
        ("aten::mm", ("## Call CompiledFxGraph fy ##",), "gemm"),
        ("atoll::sums_and_gradients", ("## Call CompiledFxGraph fy ##",), "loss"),
    ],
)
def test_what_is_around_decides_what_a_name_leaves_open(name, context, term):
    assert term_of(name, context) == term


def event(cat, name, start, duration, *, thread=1, correlation=None):
    args = {} if correlation is None else {"correlation": correlation}
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": start,
        "dur": duration,
        "pid": 1,
        "tid": thread,
        "args": args,
    }


def launch(start, correlation, *, thread=1, name="cudaLaunchKernel"):
    return event("cuda_runtime", name, start, 2.0, thread=thread, correlation=correlation)


def kernel(name, start, duration, correlation):
    return event("kernel", name, start, duration, thread=7, correlation=correlation)


GPU_TRACE = [
    event("user_annotation", UPDATE, 0.0, 100.0),
    event("cpu_op", "aten::mm", 5.0, 6.0),
    launch(6.0, 1),
    event("cpu_op", "_WeightedLoss", 12.0, 8.0),
    launch(13.0, 2),
    # The backward pass has a thread of its own.
    event("cpu_op", "autograd::engine::evaluate_function: MulBackward0", 25.0, 10.0, thread=2),
    launch(26.0, 3, thread=2),
    launch(40.0, 4),
    launch(45.0, 5),
    # Not inside any update, such as reading the scalars.
    event("cuda_runtime", "cudaStreamSynchronize", 101.0, 50.0, correlation=6),
    event("gpu_user_annotation", UPDATE, 10.0, 300.0, thread=7),
    kernel("nvjet_tst_64x64", 10.0, 40.0, 1),
    kernel(GENERIC, 50.0, 20.0, 2),
    kernel(GENERIC, 75.0, 10.0, 3),
    kernel(GENERIC, 85.0, 30.0, 4),
    kernel("my_new_kernel", 120.0, 8.0, None),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 130.0, 2.0, thread=7, correlation=5),
    {"ph": "M", "name": "process_name", "pid": 1},
]


def test_kernels_of_a_gpu_are_told_apart_by_where_they_were_launched():
    found = by_term(read_timeline(GPU_TRACE, on_device=True), targets=100)
    # Microseconds of all updates times 1000 over 100 targets. The unknown kernel counts as other;
    # the copy was launched after the last backward.
    assert found["terms_ns_per_target"] == pytest.approx(
        {
            "gemm": 400.0,
            "attention": 0.0,
            "loss": 200.0,
            "elementwise": 100.0,
            "optimizer_mixing": 320.0,
            "other": 80.0,
        }
    )
    assert found["unknown"]["count"] == 1
    assert found["unknown"]["names"] == [
        {"name": "my_new_kernel", "ns_per_target": pytest.approx(80.0), "count": 1}
    ]


def test_gaps_are_what_lies_between_kernels():
    timeline = read_timeline(GPU_TRACE, on_device=True)
    assert timeline.gaps == [5.0, 5.0, 2.0]
    assert (timeline.span, timeline.busy) == (122.0, 110.0)
    assert (timeline.launch, timeline.launches) == (10.0, 5)


def test_kernels_that_overlap_are_busy_once():
    events = [
        event("user_annotation", UPDATE, 0.0, 10.0),
        kernel("nvjet", 0.0, 10.0, 1),
        kernel("nvjet", 5.0, 3.0, 2),
        kernel("nvjet", 9.0, 6.0, 3),
    ]
    timeline = read_timeline(events, on_device=True)
    assert (timeline.span, timeline.busy, timeline.gaps) == (15.0, 15.0, [])


def test_a_replayed_graph_is_told_apart_by_names_alone():
    events = [
        event("user_annotation", UPDATE, 0.0, 10.0),
        launch(1.0, 1, name="cudaGraphLaunch"),
        kernel("nvjet_tst_64x64", 5.0, 10.0, 1),
        kernel("atoll_adamw", 15.0, 5.0, 1),
    ]
    timeline = read_timeline(events, on_device=True)
    found = by_term(timeline, targets=1000)["terms_ns_per_target"]
    assert (found["gemm"], found["optimizer_mixing"]) == (10.0, 5.0)
    assert timeline.launches == 1


CPU_TRACE = [
    event("cpu_op", "aten::mul", -5.0, 4.0),  # before the update
    event("user_annotation", UPDATE, 0.0, 100.0),
    event("cpu_op", "aten::linear", 10.0, 20.0),
    event("cpu_op", "aten::mm", 12.0, 15.0),
    event("cpu_op", "_WeightedLoss", 35.0, 20.0),
    event("cpu_op", "aten::mul", 40.0, 10.0),
    event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 60.0, 10.0),
    event("cpu_op", "MmBackward0", 61.0, 8.0),
    event("cpu_op", "aten::mm", 62.0, 6.0),
    event("cpu_op", "aten::mul_", 75.0, 5.0),
    event("cpu_op", "aten::mul", 20.0, 30.0, thread=3),  # another thread
]


def test_operators_of_a_cpu_count_their_own_time():
    found = by_term(read_timeline(CPU_TRACE, on_device=False), targets=1000)
    assert found["terms_ns_per_target"] == pytest.approx(
        {
            "gemm": 20.0 + 8.0,
            "attention": 0.0,
            "loss": 20.0,
            "elementwise": 0.0,
            "optimizer_mixing": 5.0,
            "other": 2.0,
        }
    )
    assert found["host_launch"] is None


@pytest.mark.parametrize(("events", "on_device"), [(GPU_TRACE, True), (CPU_TRACE, False)])
def test_terms_sum_to_the_total_and_with_gaps_to_the_span(events, on_device):
    found = by_term(read_timeline(events, on_device=on_device), targets=8)
    assert set(found["terms_ns_per_target"]) == set(TERMS)
    total = sum(found["terms_ns_per_target"].values())
    assert total == pytest.approx(found["total_ns_per_target"])
    assert total + found["gaps"]["ns_per_target"] == pytest.approx(found["span_ns_per_target"])
    assert found["busy_share"] == pytest.approx(total / found["span_ns_per_target"])


def test_people_see_gaps_launches_and_names_that_no_rule_knows():
    trace = by_term(read_timeline(GPU_TRACE, on_device=True), targets=100)
    parts = update_parts(ModelConfig(), local_targets=100, micro_targets=100, narrow=True)
    floor = floors(parts, Roofs(790e12, 4.3e12, {}))
    against = against_floors(trace["terms_ns_per_target"], floor, pause=70.0)
    mode = {
        "targets_per_second": {"median": 2.5e6, "min": 2.4e6, "max": 2.6e6},
        "num_windows": 8,
        "peak_device_bytes": 3 << 29,
        "ns_per_target": 400.0,
        "share_of_product_roof": 0.31,
        "floor": floor,
        "trace": trace,
        "against_floor": against,
    }
    text = table(
        {
            "device": {"name": "Some GPU"},
            "roofs": {
                "flops_per_second": 790e12,
                "bytes_per_second": 4.3e12,
                "gemm_dtype": "bfloat16",
            },
            "updates_per_window": 20,
            "modes": {"packed": mode},
            "ratios": [],
        }
    )
    assert "Some GPU: products 790 TFLOP/s (bfloat16), copies 4300 GB/s" in text
    assert "packed: 2.5M/s targets [2.4M/s .. 2.6M/s] over 8 windows of 20 updates" in text
    assert "peak 1.50 GiB" in text
    assert "pauses                      70.0" in text
    assert "3 gaps, the largest 5 us; 5 launches took the host 100.0 ns/target" in text
    assert "1 calls that no rule knows took 80.0 ns/target, counted as other: my_new_kernel" in text


def test_a_trace_without_updates_or_kernels_is_refused():
    with pytest.raises(AtollError, match="no update"):
        read_timeline([], on_device=False)
    with pytest.raises(AtollError, match="no kernel of the GPU"):
        read_timeline(GPU_TRACE[:3], on_device=True)
