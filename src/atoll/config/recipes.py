"""Where the shipped recipes lie, and how `--config` names a file."""

from importlib.resources import files
from pathlib import Path

SUFFIXES = (".yaml", ".yml")


def find_recipe(name: Path) -> Path:
    """Return the file that `--config NAME` means.

    A path means itself. A bare name without suffix that is no file here, such as `tiny`, means the
    shipped recipe of that name.
    """
    bare = name.name == str(name) and name.suffix not in SUFFIXES
    shipped = shipped_recipes()
    return shipped[name.name] if bare and not name.is_file() and name.name in shipped else name


def shipped_recipes() -> dict[str, Path]:
    """Return the shipped recipes by name; the same files as `configs/` in the repository."""
    folder = Path(str(files("atoll"))) / "recipes"
    if not folder.is_dir():
        # The wheel carries configs/ as atoll/recipes; a checkout is used from where it lies.
        folder = Path(__file__).parents[3] / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
