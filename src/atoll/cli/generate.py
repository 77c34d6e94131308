"""`atoll generate`: continue a text with a model."""

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.options import JsonOption, LocalModelOption
from atoll.cli.output import print_data, print_json, print_piece


def generate(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT_OR_MODEL",
            show_default=False,
            help="A run's folder, one checkpoint's folder, a Hugging Face model folder of the "
            "Llama architecture, or a .gguf file.",
        ),
    ],
    prompt: Annotated[
        str,
        typer.Option("--prompt", help="Text to continue. Default: the start of a document."),
    ] = "",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Tokens to add at most. Default: 64.")
    ] = 64,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            min=0,
            help="Divisor of the scores before a token is drawn; 0 takes the best. Default: 0.",
        ),
    ] = 0.0,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", min=1, help="Draw among so many best tokens only. Default: all."),
    ] = None,
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p",
            min=0,
            max=1,
            help="Draw among the best tokens that reach this probability together. Default: 1.",
        ),
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the draws. Default: 0.")] = 0,
    device: Annotated[
        str,
        typer.Option(
            "--device", help="Where to compute: cpu, cuda, cuda:N, mps or auto. Default: auto."
        ),
    ] = "auto",
    local_model: LocalModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a text, printing each piece as it comes.

    \b
    Examples:
      atoll generate runs/tiny --prompt "def main"
      atoll generate runs/tiny/weights --prompt "import " --temperature 0.8 --top-p 0.9 --seed 1
    """
    from atoll.model.sampling import Sampler
    from atoll.runner.opened import continue_text, open_model
    from atoll.train.device import resolve_device

    sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    found = resolve_device(device, option="--device")
    opened = open_model(model, device=found, local_model=local_model)
    pieces = continue_text(opened, prompt, max_tokens=max_tokens, sampler=sampler)
    if as_json:
        print_json({"model": str(opened.source), "prompt": prompt, "text": "".join(pieces)})
        return
    for piece in pieces:
        print_piece(piece)
    print_data("")
