"""Compile, and do not run, every kernel that an update launches; print their names.

python compile_kernels.py CAPABILITY        80 for an A100, 90 for an H100 or H200
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

from atoll.config.model import ModelConfig
from atoll.config.optimizer import OptimizerConfig
from atoll.model import gpu
from atoll.model.llama import Llama
from atoll.optim.adamw import AdamW, Mixing

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64"}
SCALARS = {int: "i32", float: "fp32"}


def main(capability: int) -> None:
    names: set[str] = set()

    def compile_launch(self, *arguments, grid, warmup, num_warps=4, **named):
        given = dict(zip(self.arg_names, arguments, strict=False)) | named
        types, constants = {}, {}
        for place, parameter in enumerate(self.params):
            value = given[parameter.name]
            if parameter.is_constexpr or value is None:
                types[parameter.name], constants[(place,)] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                types[parameter.name] = TYPES[value.dtype]
            else:
                types[parameter.name] = SCALARS[type(value)]
        source = ASTSource(fn=self, signature=types, constexprs=constants)
        target = GPUTarget("cuda", capability, 32)
        compile(source, target=target, options={"num_warps": num_warps})
        names.add(self.__name__)

    JITFunction.run = compile_launch
    for models, residual in ((1, "float32"), (3, "float32"), (3, "bfloat16")):
        launch_all(models, residual)
    sys.stdout.write("\n".join(sorted(names)))


def launch_all(num_models: int, residual: str) -> None:
    """Go through one update on a CPU; the numbers are meaningless, since no kernel runs."""
    shape = ModelConfig(
        vocab_size=9000,
        layers=1,
        width=320,
        heads=5,
        ffn_width=96,
        context_length=8,
        residual=residual,
    )
    model = Llama(shape, num_models=num_models)
    ids = torch.zeros(num_models, 1, 8, dtype=torch.int64)
    gpu.gradients(model, ids, ids, divisor_N=torch.ones(num_models), add=False)
    arena = model.arena
    optimizer = AdamW(
        arena.data_NP,
        arena.grad_NP,
        decay_size=arena.decay_size,
        config=OptimizerConfig(),
        kernels=True,
    )
    shares = torch.eye(num_models)
    for mixing in (None, Mixing(shares, before=True), Mixing(shares, before=False)):
        optimizer.step(
            lr=0.1,
            step=1,
            factor_N=torch.ones(num_models),
            mixing=mixing,
            skip=torch.zeros(()),
        )


if __name__ == "__main__":
    main(int(sys.argv[1]))
