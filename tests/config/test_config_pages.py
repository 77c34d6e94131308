"""The commands and links that the pages for users print."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from atoll.config.load import load_config
from atoll.config.recipes import shipped_recipes

REPOSITORY = Path(__file__).parents[2]
PAGES = ("README.md", "docs/packed.md", "docs/token-cache.md")
VERBS = "bench|cache|checkpoint|config|evaluate|export|generate|prepare|train"


def commands(page: str) -> list[list[str]]:
    """Return the words of every line of code that calls atoll, comments left out."""
    text = (REPOSITORY / page).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(rf"^ *(?:\.venv/bin/)?(atoll (?:{VERBS})\b.*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def values(words: list[str], option: str) -> list[str]:
    return [after for word, after in pairwise(words) if word == option]


@pytest.mark.parametrize(
    "words", [c for page in PAGES for c in commands(page) if "--config" in c], ids=" ".join
)
def test_every_recipe_that_a_page_prints_is_accepted(words):
    names = values(words, "--config")
    assert set(names) <= set(shipped_recipes())
    load_config([Path(name) for name in names], values(words, "--set"))


def test_the_page_on_packed_models_trains_them_every_way():
    found = [
        load_config([Path(n) for n in values(words, "--config")], values(words, "--set")).config
        for words in commands("docs/packed.md")
        if words[1] == "train"
    ]
    assert all(config.strategy.placement == "packed" for config in found)
    assert {config.strategy.kind for config in found} == {"gossip", "diloco"}
    assert {config.strategy.scheme for config in found} == {"awc", "atc", None}
    assert len({config.runtime.output_dir for config in found}) == len(found)


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page):
    here = REPOSITORY / page
    links = re.findall(r"\]\(([^)#]+)\)", here.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (here.parent / link).exists()] == []
