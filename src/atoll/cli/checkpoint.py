"""`atoll checkpoint`: list, verify and compare what runs have kept."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.options import JsonOption, RunArgument, command_group
from atoll.cli.output import print_data, print_json

if TYPE_CHECKING:
    from atoll.checkpoint.compare import Comparison

app = command_group("List, verify and compare what runs have kept.")


@app.command("list")
def list_(run: RunArgument, as_json: JsonOption = False) -> None:
    """List a run's checkpoints, oldest first, with their size and the digest of their weights.

    \b
    Examples:
      atoll checkpoint list runs/tiny
      atoll checkpoint list runs/tiny/checkpoints --json
    """
    from atoll.checkpoint.load import list_checkpoints

    rows: list[dict[str, Any]] = []
    for found in list_checkpoints(_checkpoints(run)):
        manifest = found.manifest
        rows.append(
            {
                "step": found.step,
                "folder": str(found.folder),
                "bytes": sum(m.tensors_bytes for m in manifest.members) if manifest else None,
                "parameter_digest": manifest.parameter_digest if manifest else None,
                "problem": found.problem,
            }
        )
    if as_json:
        print_json(rows)
        return
    for row in rows:
        print_data(
            f"{row['step']:>10}  {row['folder']}  "
            + (row["problem"] or f"{row['bytes']:,} bytes  weights {row['parameter_digest'][:16]}")
        )


@app.command()
def verify(run: RunArgument, as_json: JsonOption = False) -> None:
    """Check every byte against its digest; a damage is named by file, tensor and MiB, exit 1.

    \b
    Examples:
      atoll checkpoint verify runs/tiny
      atoll checkpoint verify runs/tiny/checkpoints/step-00000064 --json
    """
    from atoll.checkpoint.verify import verify_checkpoint

    folders = _one_or_all(run)
    damages = {folder: verify_checkpoint(folder) for folder in folders}
    if as_json:
        print_json(
            [
                {
                    "folder": str(folder),
                    "sound": not found,
                    "damages": [
                        {
                            "file": str(damage.file),
                            "problem": damage.problem,
                            "tensor": damage.tensor,
                            "mib": damage.mib,
                        }
                        for damage in found
                    ],
                }
                for folder, found in damages.items()
            ]
        )
    else:
        for folder, found in damages.items():
            print_data(f"{folder}: {'sound' if not found else f'{len(found)} damages'}")
            for damage in found:
                print_data(f"  {damage}")
    if any(damages.values()):
        raise typer.Exit(1)


@app.command()
def compare(
    first: Annotated[
        Path,
        typer.Argument(
            metavar="A",
            show_default=False,
            help="A run (its newest checkpoint is taken), a checkpoint, or a folder of safetensors "
            "files.",
        ),
    ],
    second: Annotated[
        Path, typer.Argument(metavar="B", show_default=False, help="Another one of the same kind.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Compare every tensor and every scalar of two states, bit by bit; a difference exits 1.

    \b
    Examples:
      atoll checkpoint compare runs/a/checkpoints/step-00000064 runs/b/checkpoints/step-00000064
      atoll checkpoint compare runs/a runs/b --json
    """
    from dataclasses import asdict

    from atoll.checkpoint.compare import compare as compare_states

    found = compare_states(_newest(first), _newest(second))
    if as_json:
        print_json({"equal": found.equal, **asdict(found)})
    else:
        _print_comparison(found)
    if not found.equal:
        raise typer.Exit(1)


def _print_comparison(found: "Comparison") -> None:
    for tensor in found.tensors:
        size = "" if tensor.max_abs is None else f", by at most {tensor.max_abs:.3g}"
        print_data(f"tensor {tensor.name}: {tensor.reason}{size}")
    for line in found.scalars:
        print_data(f"scalar {line}")
    print_data(
        f"{'equal' if found.equal else 'different'}: {found.tensors_compared} tensors and "
        f"{found.scalars_compared} scalars compared, {len(found.tensors)} and "
        f"{len(found.scalars)} differ"
    )


def _checkpoints(path: Path) -> Path:
    """Return the folder that holds the checkpoints of a run, or is it itself."""
    from atoll.errors import UsageError

    if not path.is_dir():
        raise UsageError(f"{path} is no folder.", hint="name a run's folder or a checkpoint's")
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def _newest(path: Path) -> Path:
    """Return a run's newest complete checkpoint; what is no run stays as it is."""
    from atoll.errors import UsageError
    from atoll.runner.folder import RunFolder

    run = RunFolder(path)
    if not run.checkpoints.is_dir():
        return path
    complete = run.complete_checkpoints()
    if not complete:
        raise UsageError(
            f"{run.checkpoints} holds no complete checkpoint.",
            hint="training.checkpoint_policy decides when a run keeps one",
        )
    return complete[-1].folder


def _one_or_all(path: Path) -> list[Path]:
    from atoll.checkpoint.load import list_checkpoints
    from atoll.errors import UsageError

    folder = _checkpoints(path)
    found = [listed.folder for listed in list_checkpoints(folder)]
    if not found and folder.name.startswith("step-"):
        return [folder]
    if not found:
        raise UsageError(
            f"{folder} holds no checkpoint.",
            hint="training.checkpoint_policy decides when a run keeps one",
        )
    return found
