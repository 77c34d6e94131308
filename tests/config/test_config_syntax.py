"""How the text of a recipe becomes values with places."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config.syntax import Node, dotted, flow, node_at, parse, plain


def read(text):
    faults: list[str] = []
    node = parse(text, lambda line: f"f:{line}", faults)
    return (None if node is None else plain(node)), faults


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1e6", 1_000_000),
        ("1E+3", 1000),
        ("33_554_432", 33_554_432),
        ("-5", -5),
        (".5", 0.5),
        ("5.", 5.0),
        ("true", True),
        ("~", None),
        ("", None),
    ],
)
def test_numbers_and_words_are_read_as_their_writer_means_them(text, value):
    found, faults = read(f"k: {text}")
    assert (found, faults) == ({"k": value}, [])
    assert type(found["k"]) is type(value)


@pytest.mark.parametrize(
    "text",
    ["no", "off", "yes", "on", "y", "010", "0x10", "12:30", "2026-01-02", "1_00", "=", ".inf"],
)
def test_what_yaml_1_1_would_turn_into_something_else_stays_text(text):
    assert read(f"k: {text}") == ({"k": text}, [])


def test_a_digit_string_too_long_for_an_integer_is_a_number_out_of_range():
    value, faults = read("k: " + "9" * 5000)
    assert (value, faults) == ({"k": float("inf")}, [])


def test_a_key_given_twice_is_refused_with_both_places():
    assert read("a: 1\nb: 2\na: 3")[1] == ["f:3: a is given twice; the first is at f:1."]


def test_a_key_given_twice_deep_inside_is_refused():
    assert read("a:\n  b: {c: 1, c: 2}")[1] == ["f:2: c is given twice; the first is at f:2."]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: b: c", "f:1: not valid YAML: mapping values are not allowed here."),
        ("a: 1\n---\nb: 2", "f:2: not valid YAML: expected a single document"),
        ("a: &x [1]\nb: *x", "f:2: not valid YAML: the alias *x is not allowed."),
        ("a: &x [*x]", "f:1: not valid YAML: the alias *x is not allowed."),
        ("a: !!python/object:os.system x", "f:1: not valid YAML: the tag"),
        ("a: !!int 3", "f:1: not valid YAML: the tag tag:yaml.org,2002:int is not allowed."),
        ("a: [1,", "f:1: not valid YAML: while parsing a flow"),
        ("ok: 1\nb: \x00", "f:2: not valid YAML: it holds the character U+0000"),
        ("1: a", "f:1: a key must be text; write it in quotes if it is meant so."),
        ("? [a]\n: b", "f:1: a key must be text; write it in quotes if it is meant so."),
    ],
)
def test_what_is_not_a_plain_recipe_is_refused_with_its_line(text, fault):
    _, faults = read(text)
    assert len(faults) == 1
    assert faults[0].startswith(fault)


def test_an_empty_text_has_no_value_and_no_fault():
    assert read("# only a comment\n") == (None, [])


def test_every_value_knows_the_line_of_its_key():
    root = parse("a:\n  b:\n    [1,\n     2]\n", lambda line: f"f:{line}", [])
    assert root is not None
    assert node_at(root, ("a", "b")).origin == "f:2"
    assert node_at(root, ("a", "b", 1)) == Node(2, "f:4")
    assert node_at(root, ("a", "x", "y")) is None


def test_a_place_is_shown_as_it_would_be_written():
    assert dotted(("data", "source", 1, "weight")) == "data.source[1].weight"


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**29), 10**29)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"))
    | st.sampled_from(["1e-3", "no", "null", "1_000", "010", "~", "1:30", "<<", "=", "- a", "a: b"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab:# ", min_size=1), inner)
    ),
    max_leaves=6,
)


@given(values)
@settings(deadline=None, max_examples=150)
def test_a_value_written_on_one_line_reads_back_equal(value):
    line = flow(value)
    found, faults = read(f"k: {line}")
    assert faults == []
    assert found == {"k": value}
    assert "\n" not in line
