"""`atoll export`: a folder that Hugging Face's libraries load."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from atoll.cli.options import JsonOption, LocalModelOption
from atoll.cli.output import print_data, print_json


def export(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT",
            show_default=False,
            help="A run's folder, one checkpoint's folder, a Hugging Face model folder of the "
            "Llama architecture, or a .gguf file.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            metavar="DIR",
            show_default=False,
            help="Folder to write; it must be new or empty. Default: none, it is required.",
        ),
    ],
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option("--dtype", help="Type of the written weights. Default: float32."),
    ] = "float32",
    local_model: LocalModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write weights, tokenizer and model card as a Hugging Face folder.

    \b
    Examples:
      atoll export runs/tiny --output exported/tiny
      atoll export runs/tiny/checkpoints/step-00000064 --output exported/64 --dtype bfloat16
      atoll export runs/packed --output exported/3 --local-model 3
    """
    import torch

    from atoll.model.huggingface import save_pretrained
    from atoll.runner.opened import open_model

    opened = open_model(model, device=torch.device("cpu"), local_model=local_model)
    save_pretrained(
        opened.model,
        output,
        tokenizer=opened.tokenizer_files or None,
        special_ids=opened.special_ids,
        dtype=getattr(torch, dtype),
    )
    if as_json:
        facts = {"source": str(opened.source), "output": str(output), "dtype": dtype}
        print_json({**facts, "local_model": local_model})
        return
    print_data(str(output))
