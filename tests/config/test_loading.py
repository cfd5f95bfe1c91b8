"""The settings of a run: what is accepted, what is refused and how, and every config that ships."""

from __future__ import annotations

from pathlib import Path

import pytest

from invdist import config
from invdist.config.registry import STRATEGIES
from invdist.runtime.errors import UserError
from tests.conftest import REPOSITORY

CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))


def _write(folder: Path, text: str) -> Path:
    file = folder / "run.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_shipped_config_loads_and_survives_a_round_trip(tmp_path: Path, file: Path) -> None:
    loaded = config.load(file)
    again = config.load(_write(tmp_path, config.dump(loaded)))
    assert again == loaded
    assert again.strategy == loaded.strategy


def test_the_shipped_configs_are_the_runs_people_do() -> None:
    assert {"local", "ml1m", "microvideo", "kuairand", "multi-gpu"} <= {file.stem for file in CONFIGS}


def test_strategy_options_come_from_the_section_of_the_chosen_method(tmp_path: Path) -> None:
    file = _write(tmp_path, "method: none\ndata: {path: x}\nig: {alpha: 1e-5, candidates: [-3, 0, 3]}\n")
    chosen = config.load(file, ["method=ig"])
    assert chosen.strategy.alpha == 1e-5
    assert chosen.strategy.candidates == [-3.0, 0.0, 3.0]
    assert not hasattr(config.load(file).strategy, "alpha")


def test_all_problems_of_file_overrides_and_strategy_sections_come_together(tmp_path: Path) -> None:
    file = _write(
        tmp_path,
        "method: igg\ndata: {path: x, batch_size: 0}\nig: {alpha: -1}\noptimizer: {gama: 1}\nnone: {x: 1}\n",
    )
    with pytest.raises(UserError) as caught:
        config.load(file, ["tower.dropout=1", "ray.device=tpu"])
    text = str(caught.value)
    for expected in (
        f"{file}: method: expected text that is one of ",
        f"{file}: data.batch_size: expected a whole number at least 1 or auto, not 0",
        f"{file}: ig.alpha: expected a number above 0 or null, not -1",
        f"{file}: optimizer.gama: no such key; did you mean optimizer.gamma?",
        f"{file}: none.x: no such key",
        "command line: tower.dropout: expected a number at least 0 and below 1, not 1",
        "command line: ray.device: expected one of auto, cpu, cuda, not 'tpu'",
    ):
        assert expected in text
    assert text.startswith("7 problems")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["data.batch_size=2", "ray.workers=3"], "data.batch_size"),
        (["name=../elsewhere"], "name"),
        (["rows.dim=30"], "rows.dim"),
        (["rows.sharding=row_wise", "rows.item_sharding=column_wise"], "rows.item_sharding"),
        (["rows.item_sharding=data_parallel", "rows.memory=uvm"], "rows.memory"),
        (["rows.item_sharding=data_parallel", "exposures.vectors=true"], "rows.item_sharding"),
        (["optimizer.gamma=0"], "optimizer.gamma"),
        (["unlabeled.mix=1.5"], "unlabeled.mix"),
        (["ig.candidates=[1, 2]"], "ig.candidates"),
        (["igg.alpha=1"], "did you mean ig"),
    ],
)
def test_impossible_values_are_refused_by_key(tmp_path: Path, overrides: list[str], key: str) -> None:
    with pytest.raises(UserError, match=key):
        config.load(_write(tmp_path, "data: {path: x}"), overrides)


def test_every_field_has_a_doc_line() -> None:
    import argparse

    from invdist.config.fields import Section, describe

    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    sections = {name: field.annotation for name, field in config.Config.model_fields.items()}
    sections |= {name: STRATEGIES.get(name).Config for name in STRATEGIES.names()}
    checked = 0
    for name, kind in sections.items():
        if isinstance(kind, type) and issubclass(kind, Section):
            assert all(f.description for f in kind.model_fields.values()), name
            assert describe(kind, f"{name}.") in parser.format_help()
            checked += 1
    assert checked == 11 + len(STRATEGIES.names())
    assert "ig.alpha  (a number above 0 or null; default null)" in parser.format_help()


@pytest.mark.parametrize(("name", "now"), [("none_warm", "none"), ("ig_warm", "ig")])
def test_a_removed_strategy_is_named_with_what_replaces_it(name: str, now: str) -> None:
    from invdist.config.fields import build
    from invdist.study.spec import Study

    instead = f"was removed; use method={now} with exposures.vectors=true"
    old = {"method": name, "data": {"path": "x"}, name: {"warmup": {"passes": 3}}}
    with pytest.raises(UserError) as error:
        config.from_mapping(old, source="old.yaml")
    assert f"old.yaml: method: {name} {instead}" in str(error.value)
    assert f"old.yaml: {name}: {instead}" in str(error.value)
    with pytest.raises(UserError, match=f"command line: method: {name} {instead}"):
        config.from_mapping({"data": {"path": "x"}}, [f"method={name}"])
    with pytest.raises(UserError, match=f"strategies: {name} {instead}"):
        build(Study, {"name": "s", "strategies": ["none", name], "tables": [{"name": "t", "data": {"path": "x"}}]})
    with pytest.raises(UserError, match=f"method: {name} {instead}"):
        STRATEGIES.get(name)
