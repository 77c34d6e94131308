"""A measurement on a GPU: every kernel has a term, and memory is that of the device."""

import pytest
import torch

from atoll.bench.throughput import Request, throughput
from atoll.config.schema import RunConfig

pytestmark = pytest.mark.gpu


def recipe(**runtime):
    strategy = {
        "kind": "gossip",
        "placement": "packed",
        "models": 4,
        "topology": "one_peer_exponential",
        "scheme": "awc",
    }
    return RunConfig.model_validate(
        {
            "model": {
                "vocab_size": 4096,
                "layers": 2,
                "width": 128,
                "heads": 2,
                "ffn_width": 256,
                "context_length": 256,
            },
            "strategy": strategy,
            "training": {"batch_tokens": 16_384, "micro_batch_size": 16},
            "runtime": {"device": "cuda:0"} | runtime,
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "runtime",
    [
        {},
        {"capture": False},
        {"kernels": False},
        {"kernels": False, "compile": False},
    ],
    ids=["as it comes", "not captured", "compiled", "plain"],
)
def test_every_kernel_of_a_gpu_has_a_term(runtime):
    request = Request(modes=("packed", "single"), updates=3, windows=2)
    document = throughput(recipe(**runtime), request, command=[])
    for found in document["modes"].values():
        terms = found["trace"]["terms_ns_per_target"]
        assert found["trace"]["unknown"]["names"] == []
        assert min(terms[term] for term in terms if term != "other") > 0
        assert sum(terms.values()) == pytest.approx(found["trace"]["total_ns_per_target"])
        assert 0 < found["trace"]["busy_share"] <= 1
        assert found["trace"]["host_launch"]["count"] > 0
        # Weights, gradients and moments at least, and less than the device has.
        state = 16 * found["parameters_of_all_models"]
        assert state < found["peak_device_bytes"] < torch.cuda.get_device_properties(0).total_memory
