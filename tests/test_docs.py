"""Doc pages name what is there: links, headings, files, functions, commands and settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from invdist.cli.main import COMMANDS
from invdist.config.schema import ExposuresConfig
from tests.conftest import REPOSITORY

PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").glob("*.md"))]


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings. Of a link in a heading, the text counts and the address does not."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_files_and_commands_exist(page: Path) -> None:
    text = page.read_text()
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
        if "://" not in link:
            target = page.parent / link if link else page
            assert target.exists(), link
            assert not anchor or anchor in _anchors(target), f"{link}#{anchor}"
    for file in re.findall(r"`((?:invdist|tests|configs|launch)/[\w/.-]+)`", text):
        assert "NAME" in file or (REPOSITORY / file).exists(), file
    before = "CHANGELOG" in page.name
    assert before or set(re.findall(r"python -m invdist\.(\w+)", text)) <= {"train"}
    commands = re.findall(r"^\s*invdist (\w+)", "\n".join(re.findall(r"```(?:ba)?sh\n(.*?)```", text, re.DOTALL)), re.M)
    assert set(commands) <= set(COMMANDS)


def test_each_stop_of_the_walk_is_in_its_file() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    rows = [line.split(" | ")[1] for line in text.splitlines() if re.match(r"\| \d+\. ", line)]
    assert len(rows) == 13
    for row in rows:
        source = ""
        for name in re.findall(r"`([\w./]+)`", row):
            if name.endswith(".py"):
                source = (REPOSITORY / "invdist" / name).read_text()
            else:
                for part in name.split("."):
                    assert re.search(rf"(?:def|class) {part}\b", source), f"{name} in: {row}"


def test_every_setting_of_exposure_vectors_is_documented() -> None:
    text = (REPOSITORY / "docs" / "exposures.md").read_text()
    documented = re.findall(r"^\| `(\w+)` \| (\w+|[\d.]+) \|", text, re.MULTILINE)
    defaults = {name: str(field.default) for name, field in ExposuresConfig.model_fields.items()}
    as_yaml = {"False": "false", "True": "true", "None": "null"}
    assert dict(documented) == {name: as_yaml.get(v, v) for name, v in defaults.items()}
