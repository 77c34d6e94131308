"""The page docs/reference/recipe.md, written from the schema so that it cannot fall behind."""

from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from atoll.config.base import Section
from atoll.config.describe import describe, item_sections_in, sections_in
from atoll.config.recipes import shipped_recipes
from atoll.config.schema import RunConfig
from atoll.config.syntax import flow

_INTRODUCTION = """\
# Recipe

<!-- Written by atoll.config.reference; `pytest --update-golden` writes it anew. -->

A recipe is a YAML file of sections. `--config` repeats: a later file overrides an earlier one,
mappings merge, lists and everything else are replaced. `--set SECTION.NAME=VALUE` comes last, its
value written as in YAML. `atoll config show --origins` prints the result with the file and line
that each value comes from; `resolved.yaml` in a run's folder is the same and loads by itself.

Values mean what YAML 1.2 says: `true` and `false` are the only booleans, `1e-3` is a number, `no`
and `010` are text. Whole numbers may be grouped, `131_072`, or written `1e6`. Paths are relative to
the folder that atoll is started in. Unknown names are refused.
"""


def reference_page() -> str:
    """Return the page: every setting with what it accepts, its default and its meaning."""
    lines = [_INTRODUCTION, *_recipe_table()]
    for name, field in RunConfig.model_fields.items():
        for section in sections_in(field.annotation):
            lines += _section(section, name, level="##")
    return "\n".join(lines) + "\n"


def _recipe_table() -> Iterator[str]:
    yield "## Shipped recipes\n"
    yield "| name | what it is |"
    yield "|---|---|"
    for name, path in shipped_recipes().items():
        first = path.read_text(encoding="utf-8").splitlines()[0]
        yield f"| `{name}` | {_cell(first.removeprefix('# '))} |"
    yield ""


def _section(section: type[Section], name: str, *, level: str) -> Iterator[str]:
    yield f"{level} `{name}`\n"
    yield f"{section.__doc__}\n"
    yield "| setting | accepts | default | meaning |"
    yield "|---|---|---|---|"
    inner: list[tuple[str, type[Section]]] = []
    for key, field in section.model_fields.items():
        accepts = describe(field.annotation, field.metadata)
        meaning = _cell(" ".join((field.description or "").split()))
        yield f"| `{key}` | {_cell(accepts)} | {_default(field)} | {meaning} |"
        kinds = (*sections_in(field.annotation), *item_sections_in(field.annotation))
        inner += [(f"{name}.{key}", kind) for kind in dict.fromkeys(kinds)]
    yield ""
    for full, kind in inner:
        yield from _section(kind, f"{full}{_kind(kind)}", level="###")


def _kind(section: type[Section]) -> str:
    """Tell apart the mappings of one setting, as in `model.rope_scaling, kind: linear`."""
    field = section.model_fields.get("kind")
    return f", kind: {describe(field.annotation)}" if field else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.default
    if isinstance(value, Section):
        return "a mapping of its own defaults"
    return f"`{flow(value if isinstance(value, bool | int | float | list | None) else str(value))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
