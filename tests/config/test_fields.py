"""The machinery behind every config: types, ranges, suggestions, all problems at once, hostile YAML."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import field_validator

from invdist.config.fields import Count, OpenShare, Positive, Section, build, describe, to_mapping
from invdist.config.plain_yaml import MAX_BYTES, read_yaml, to_yaml
from invdist.runtime.errors import UserError


class Inner(Section):
    """A section."""

    rate: Positive = 0.1
    """Learning rate
    of the inner steps."""
    kind: Literal["sign", "sgd"] = "sign"
    """Which."""
    steps: list[int] = [1, 2]
    """Where."""


class Outer(Section):
    """A whole config."""

    path: str
    """Where it is."""
    share: OpenShare = 0.1
    """How much."""
    count: Count = 3
    """How many."""
    flag: bool = False
    name: str | None = None
    inner: Inner = Inner()
    others: list[Inner] = []
    grid: dict[str, list[float]] = {}

    def check(self) -> Iterator[tuple[str, str]]:
        """Problems across fields."""
        if self.flag and self.count < 2:
            yield "count", "expected at least 2 with flag"


def _problems(mapping: object, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        build(Outer, mapping, overrides, source="a.yaml")  # type: ignore[arg-type]
    return [line.strip() for line in str(caught.value).splitlines()]


def test_file_values_and_overrides_become_typed_fields() -> None:
    mapping = {
        "path": "x",
        "inner": {"rate": "1e-4", "steps": [4]},
        "others": [{"rate": 2}],
        "grid": {"a": [1]},
    }
    outer = build(Outer, mapping, ["share=5e-1", "inner.kind=sgd", "name=12", "flag=true", "count=1e1"])
    inner = Inner(rate=1e-4, kind="sgd", steps=[4])
    expected = Outer(path="x", share=0.5, count=10, flag=True, name="12", inner=inner, grid={"a": [1.0]})
    expected.others = [Inner(rate=2.0)]
    assert outer == expected
    assert isinstance(outer.others[0].rate, float)


def test_override_null_empties_an_optional_text_field() -> None:
    assert build(Outer, {"path": "x", "name": "n"}, ["name=null"]).name is None


def test_a_section_whose_keys_are_all_commented_out_takes_overrides() -> None:
    assert build(Outer, {"path": "x", "inner": None}, ["inner.rate=3"]).inner == Inner(rate=3.0)


def test_override_replaces_a_section_given_as_a_mapping() -> None:
    assert build(Outer, {"path": "x"}, ["inner={rate: 3, steps: [7]}"]).inner == Inner(rate=3.0, steps=[7])


def test_every_problem_is_reported_at_once_with_place_key_and_remedy() -> None:
    lines = _problems(
        {"share": 1, "cuont": 2, "inner": {"rate": 0, "kind": "adam"}, "flag": 1, "others": [{"rate": -1}]},
        "count=2.5",
        "inner.stepz=[1]",
        "nonsense",
    )
    assert lines == [
        "10 problems in the settings",
        "command line: 'nonsense': expected key=value, for example training.epochs=5",
        "a.yaml: path: is missing; expected text",
        "a.yaml: share: expected a number above 0 and below 1, not 1",
        "command line: count: expected a whole number at least 1, not 2.5",
        "a.yaml: flag: expected true or false, not 1",
        "a.yaml: inner.rate: expected a number above 0, not 0",
        "a.yaml: inner.kind: expected one of sign, sgd, not 'adam'",
        "command line: inner.stepz: no such key; did you mean inner.steps?",
        "a.yaml: others.0.rate: expected a number above 0, not -1",
        "a.yaml: cuont: no such key; did you mean count?",
    ]


def test_check_across_fields_names_the_field() -> None:
    assert _problems({"path": "x", "flag": True, "count": 1}) == ["a.yaml: count: expected at least 2 with flag"]


class Required(Section):
    """A section with a key that must be given."""

    place: str
    size: Count = 1


class Blamed(Section):
    """Sections that a file may leave out."""

    path: str = "x"
    inner: Inner = Inner()
    made: Required | None = None
    several: list[Required] = []


@pytest.mark.parametrize(
    ("mapping", "overrides", "expected"),
    [
        # A section that only the command line made is the command line's, whatever is wrong with it.
        ({}, ["made.size=2"], "command line: made.place: is missing; expected text"),
        ({"made": None}, ["made.size=2"], "command line: made.place: is missing; expected text"),
        ({}, ["made={size: 2}"], "command line: made.place: is missing; expected text"),
        ({}, ["made.place=a", "made.sise=2"], "command line: made.sise: no such key; did you mean made.size?"),
        ({}, ["mode.place=a"], "command line: mode: no such key; did you mean made?"),
        ({}, ["several=[{place: a}, {size: 2}]"], "command line: several.1.place: is missing; expected text"),
        ({}, ["inner={rate: 0}"], "command line: inner.rate: expected a number above 0, not 0"),
        ({}, ["inner={rat: 1}"], "command line: inner.rat: no such key; did you mean inner.rate?"),
        ({}, ["inner=[1]"], "command line: inner: expected a section with keys, not [1]"),
        # What is wrong in the file stays the file's, though the command line has set something beside it.
        ({"made": {"size": 2}}, ["made.size=3"], "a.yaml: made.place: is missing; expected text"),
        ({"inner": {"rat": 1}}, ["inner.rate=3"], "a.yaml: inner.rat: no such key; did you mean inner.rate?"),
        ({"mode": {"size": 2}}, ["mode.place=a"], "a.yaml: mode: no such key; did you mean made?"),
        ({"several": [{"size": 2}]}, ["inner.rate=3"], "a.yaml: several.0.place: is missing; expected text"),
        ({"inner": {"rate": 0}}, ["inner.steps=[1]"], "a.yaml: inner.rate: expected a number above 0, not 0"),
    ],
)
def test_who_is_to_blame(mapping: dict, overrides: list[str], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        build(Blamed, mapping, overrides, source="a.yaml")
    assert str(caught.value) == expected


def test_fields_that_disagree_because_of_the_command_line_are_its_problem() -> None:
    file = {"path": "x", "count": 1}
    assert _problems(file, "flag=true") == ["command line: count: expected at least 2 with flag"]
    assert _problems({**file, "flag": True}, "name=n") == ["a.yaml: count: expected at least 2 with flag"]


def test_defaults_are_not_shared() -> None:
    first, second = Outer(path="a"), Outer(path="b")
    first.inner.steps.append(9)
    first.grid["a"] = []
    assert second == Outer(path="b")
    assert second.inner.steps == [1, 2]


def test_a_validator_of_pydantic_names_its_field() -> None:
    class Even(Section):
        number: int = 0

        @field_validator("number")
        @classmethod
        def _even(cls, value: int) -> int:
            if value % 2:
                raise ValueError(f"expected an even number, not {value}")
            return value

    with pytest.raises(UserError, match=r"^command line: number: expected an even number, not 3$"):
        build(Even, {}, ["number=3"], source="a.yaml")


@dataclass(kw_only=True, slots=True)
class Plain:
    """Options of somebody else's strategy, as a plain dataclass."""

    weight: float = 1.0
    sizes: list[int] = field(default_factory=lambda: [1])
    required: Positive

    def check(self) -> Iterator[tuple[str, str]]:
        """Problems across fields."""
        if len(self.sizes) > 2:
            yield "sizes", "expected two at most"

    def doubled(self) -> float:
        """A method that the strategy uses."""
        return 2 * self.weight


def test_a_plain_dataclass_is_a_section_too() -> None:
    built = build(Plain, {"required": 1}, ["weight=1e-4"])
    assert (built.weight, built.sizes, built.required, built.doubled()) == (1e-4, [1], 1.0, 2e-4)
    assert to_mapping(built) == {"weight": 1e-4, "sizes": [1], "required": 1.0}
    assert "plain.weight  (a number; default 1.0)\nplain.sizes" in describe(Plain, "plain.")
    for overrides, message in (
        (["weight=x"], "2 problems in the settings\n.*weight: expected a number, not 'x'\n.*required: is missing"),
        (["required=1", "waight=1"], "no such key; did you mean weight"),
        (["required=1", "sizes=[1, 2, 3]"], "sizes: expected two at most"),
    ):
        with pytest.raises(UserError, match=message):
            build(Plain, {}, overrides)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("count=0", "a whole number at least 1"),
        ("count=true", "a whole number"),
        ("count=1_e5", "a whole number"),
        ("count=99999999999999999999", "a whole number"),
        ("share=nan", "a number above 0"),
        ("share=.inf", "a number above 0"),
        ("inner.rate=fast", "a number above 0"),
        ("inner.steps=3", "a list of"),
        ("inner=3", "a section with keys"),
        ("share.x=1", "no such key|single value"),
        ("path.deeper=1", "single value"),
        ("grid={a: [x]}", "a mapping"),
        ("share=[", "a number above 0"),
    ],
)
def test_wrong_values_say_what_would_be_right(override: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(Outer, {"path": "x", "share": 0.5}, [override])


def test_describe_shows_key_type_default_and_doc_line() -> None:
    text = describe(Outer)
    assert "path  (text; required)\n    Where it is." in text
    assert "inner.rate  (a number above 0; default 0.1)\n    Learning rate of the inner steps." in text
    assert "inner.kind  (one of sign, sgd; default sign)" in text


@given(
    rate=st.floats(min_value=1e-300, max_value=1e300),
    count=st.integers(min_value=1, max_value=2**53),
    text=st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"])),
    steps=st.lists(st.integers(min_value=-(2**62), max_value=2**62)),
)
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, rate: float, count: int, text: str, steps: list[int]
) -> None:
    outer = Outer(path=text, count=count, name=text, inner=Inner(rate=rate, steps=steps))
    file = tmp_path_factory.mktemp("settings") / "a.yaml"
    file.write_text(to_yaml(to_mapping(outer)), encoding="utf-8")
    assert build(Outer, read_yaml(file)) == outer


HOSTILE = [
    b"a: !!python/object/apply:os.system ['true']",
    b"a: &x [1]\nb: *x",
    b"a: 1\na: 2",
    b"[1, 2]",
    b"just text",
    b"a: [1",
    b"\xff\xfe\x00",
    b"a: !!timestamp nonsense",
    b"a: !!int ''",
    b"a: 2001-99-99",
    b"? [1, 2]\n: 3",
    b"[" * 5000,
    b"a: " + b"9" * 5000,
    b"x" * (MAX_BYTES + 1),
    b"path: {",
    b"? {a: 1}\n: 2",
]


@pytest.mark.parametrize("content", HOSTILE, ids=lambda content: repr(content[:24]))
def test_hostile_yaml_is_a_message_with_the_file_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "hostile.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"hostile\.yaml"):
        build(Outer, read_yaml(file), source=str(file))


@given(st.binary(max_size=300))
@example(b"path: x\ninner: {rate: !!float x}")
@settings(max_examples=300, deadline=None)
def test_any_bytes_give_settings_or_a_message(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    file.write_bytes(content)
    with contextlib.suppress(UserError):
        assert isinstance(build(Outer, read_yaml(file)), Outer)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
_KEYS = ["path", "share", "count", "flag", "name", "inner", "others", "grid", "rate", "steps"]


@given(st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=6), st.lists(st.text(max_size=12), max_size=3))
@settings(max_examples=300, deadline=None)
def test_any_mapping_and_overrides_give_settings_or_a_message(mapping: dict[str, object], overrides: list[str]) -> None:
    with contextlib.suppress(UserError):
        assert isinstance(build(Outer, mapping, overrides), Outer)


def test_deep_nesting_is_said_in_plain_words(tmp_path: Path) -> None:
    file = tmp_path / "deep.yaml"
    file.write_bytes(b"a: " + b"[" * 5000)
    with pytest.raises(UserError, match=r"deep\.yaml: nested too deeply$"):
        read_yaml(file)


@pytest.mark.parametrize("missing", ["absent.yaml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, missing: str) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_yaml(tmp_path / missing)


def test_an_empty_file_is_an_empty_mapping(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").touch()
    assert read_yaml(tmp_path / "empty.yaml") == {}
    assert yaml.safe_load("") is None
