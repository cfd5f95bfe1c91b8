"""Which trials a study has, and what it refuses before the first of them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from invdist import config as configs
from invdist.runtime.errors import UserError
from invdist.study import run as running
from invdist.study.space import cases, draw, identity, resolve
from invdist.study.spec import load
from tests.study.specs import tiny, written


def test_draws_are_different_points_of_the_product_and_repeatable():
    choices = {"a": [1, 2, 3], "b": ["x", "y"], "c": [0.1, 0.2, 0.3, 0.4]}
    everything = [dict(zip(choices, values)) for values in itertools.product(*choices.values())]
    points = draw(choices, 8, "seed")
    assert len(points) == 8
    assert all(point in everything for point in points)
    assert all(points.count(point) == 1 for point in points)
    assert points == draw(choices, 8, "seed") != draw(choices, 8, "other")


def test_a_small_space_is_gone_through_whole():
    points = draw({"a": [1, 2], "b": [3, 4]}, 8, "seed")
    assert sorted((p["a"], p["b"]) for p in points) == [(1, 3), (1, 4), (2, 3), (2, 4)]


def test_points_to_start_with_come_first_and_count_as_trials():
    first = {"a": 3, "b": "y"}
    points = draw({"a": [1, 2, 3, 4], "b": ["x", "y", "z"]}, 5, "seed", [first])
    assert points[0] == first
    assert len(points) == 5
    assert points.count(first) == 1


def test_every_strategy_and_backbone_has_the_same_budget_and_means_is_always_there(tmp_path: Path):
    mapping = tiny(tmp_path, models=["gmf", "neumf"], trials=3)
    mapping["space"].append({"strategies": ["none"], "choices": {"optimizer.weight_decay": [0.0, 0.1]}})
    study = load(written(mapping, tmp_path))
    rows = cases(study, study.tables[0])
    assert [(row.strategy, row.backbone) for row in rows] == [
        ("none", "gmf"),
        ("ig", "gmf"),
        ("none", "neumf"),
        ("ig", "neumf"),
        ("means", "-"),
    ]
    assert {len(row.points) for row in rows if row.strategy != "means"} == {3}


def test_compared_values_are_rows_of_their_own(tmp_path: Path):
    study = load(written(tiny(tmp_path, strategies=["ig"], compare={"ig.alpha_ratio": [0.1, 50]}), tmp_path))
    rows = cases(study, study.tables[0])
    assert [row.label for row in rows] == ["ig, alpha_ratio 0.1", "ig, alpha_ratio 50", "means"]
    assert {point["ig.alpha_ratio"] for point in rows[1].points} == {50}


def test_tuning_configs_do_not_see_the_test_rows(tmp_path: Path):
    study = load(written(tiny(tmp_path), tmp_path))
    case = cases(study, study.tables[0])[0]
    tuning = resolve(study, study.tables[0], case, case.points[0], 0, path="x")
    assert tuning.training.test is False
    assert (tuning.ray.workers, tuning.data.readers) == (1, 0)


def test_identity_is_of_settings_and_data_not_of_places(tmp_path: Path):
    study = load(written(tiny(tmp_path), tmp_path))
    case = cases(study, study.tables[0])[0]
    one, other = (resolve(study, study.tables[0], case, case.points[0], 0, path=path) for path in ("x", "y"))
    assert identity(one, "data") == identity(other, "data") != identity(one, "other data")
    other.exposures.path, other.exposures.dim = "y", 32  # without vectors nobody reads it
    assert identity(one, "data") == identity(other, "data")
    other.exposures.vectors = True
    assert identity(one, "data") != identity(other, "data")
    other.exposures.vectors = False
    other.optimizer.gamma = 0.123
    assert identity(one, "data") != identity(other, "data")
    assert configs.from_text(configs.dump(one)).data.path == "x"  # the config itself is left as it was


def test_settings_that_the_data_does_not_allow_are_replaced(tmp_path: Path, all_labeled: Path):
    """On a log without unclear rows every strategy keeps its budget, but for those that have nothing to do there."""
    choices = {"unlabeled.source": ["exposures", "sampled", "mix"], "unlabeled.rate": [1, 4, 16]}
    mapping = tiny(
        tmp_path,
        strategies=["none", "idl", "ig", "srns"],
        trials=5,
        space=[
            {"choices": {"optimizer.gamma": [0.001, 0.002, 0.003, 0.004, 0.005]}},
            {"strategies": ["idl", "ig"], "choices": choices},
            {"strategies": ["srns"], "choices": {"unlabeled.rate": [17]}},
        ],
        start=[{"strategies": ["ig"], "settings": {"unlabeled.source": "exposures"}}],
    )
    mapping["tables"][0]["data"] = {"path": str(all_labeled)}
    study = load(written(mapping, tmp_path))
    planned = running.check(study)["feed"]
    by_name = {case.strategy: case for case in planned}
    assert {name: len(case.points) for name, case in by_name.items()} == {
        "none": 5,
        "idl": 5,
        "ig": 5,
        "srns": 0,
        "means": 1,
    }
    for name in ("idl", "ig"):
        assert {point["unlabeled.source"] for point in by_name[name].points} == {"sampled"}
    assert by_name["none"].left_out == ()
    assert any("no unclear exposures" in reason for reason in by_name["ig"].left_out)
    plan = "\n".join(running.plan({"feed": planned}, study))
    assert "srns-gmf: none of its settings fits the data" in plan
    assert "left out: srns.memory: 16 candidates" in plan

    # Where everything fits, knowing the data changes no draw.
    assert cases(study, study.tables[0])[0].points == by_name["none"].points

    study.base["data"] = {"batch_size": 10**9}
    with pytest.raises(UserError, match=r"no setting fits .*batch_size"):
        running.check(study)


def test_a_setting_that_is_written_in_two_ways_is_tried_once(tmp_path: Path):
    choices = {"optimizer.gamma": [0.001, "1e-3", 0.002], "ig.alpha_ratio": [1, 1.0]}
    mapping = tiny(tmp_path, strategies=["ig"], trials=6, space=[{"choices": choices}])
    study = load(written(mapping, tmp_path))
    ig = cases(study, study.tables[0])[0]
    configs_of = [resolve(study, study.tables[0], ig, point, 0, path="x") for point in ig.points]
    assert sorted(config.optimizer.gamma for config in configs_of) == [0.001, 0.002]


def test_lists_are_compared_and_an_empty_section_says_nothing(tmp_path: Path):
    lists = [[-1, 0, 1], [-3, 0, 3]]
    mapping = tiny(tmp_path, strategies=["ig"], compare={"ig.candidates": lists})
    mapping["base"] |= {"ray": None, "tower": None}
    mapping["tables"][0]["base"] = {"training": None}
    study = load(written(mapping, tmp_path))
    rows = cases(study, study.tables[0])
    assert len({rows[0], rows[1], rows[2]}) == 3
    config = resolve(study, study.tables[0], rows[1], rows[1].points[0], 0, path="x")
    assert config.strategy.candidates == lists[1]
    assert config.training.epochs == 3


def _space(choices: dict) -> dict:
    return {"space": [{"choices": choices}]}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"strategies": ["none", "igg"]}, "igg"),
        ({"models": ["gmff"]}, "gmff"),
        (_space({"optimizer.gama": [0.1]}), "did you mean optimizer.gamma"),
        (_space({"ig.alfa": [0.1]}), "ig.alfa"),
        (_space({"optimizer.gamma": [0.001, 0.01, -1]}), "above 0 or auto, not -1"),
        (_space({"optimizer.gamma": []}), "at least one value"),
        ({"base": {"trainning": {"epochs": 1}}}, "did you mean training"),
        ({"search": "grid", **_space({"optimizer.gamma": [0.1, 0.2, 0.3]})}, "the grid has 3 points"),
        ({"tuning_seed": 1}, "selected on another seed"),
        ({"seeds": [0, 0]}, "none twice"),
        ({"trails": 8}, "did you mean trials"),
        ({"start": [{"settings": {"optimizer.gamma": 7}}]}, "not among its choices"),
        ({"start": [{"strategies": ["ig"], "settings": {"ig.alfa_ratio": 1}}]}, "ig.alfa_ratio has no choices there"),
        ({"strategies": ["ig", "none", "ig"]}, "none twice"),
        ({"models": []}, "at least one"),
        ({"compare": {"ig.alpha_ratio": []}}, "compare.ig.alpha_ratio"),
        ({"base": {"checkpoint": {"path": "elsewhere"}}}, "checkpoint.path"),
        ({"tables": [{"name": "a", "data": {}}]}, "either a path or"),
        ({"tables": [{"name": "a/b", "data": {"path": "x"}}]}, "without slashes"),
        ({"tables": [{"name": "a", "data": {"path": "no-such-folder"}}]}, "no-such-folder"),
        ({"tables": [{"name": "a", "data": {"prepare": {"kind": "ml-2m"}}}]}, "table a: 'ml-2m' is not a kind of log"),
        ({"tables": [{"name": "a", "data": {"prepare": {"kind": "ml-1m", "input": ["nowhere.zip"]}}}]}, "nowhere.zip"),
        ({"tables": [{"name": "a", "data": {"prepare": {"kind": "synthetic", "options": {"prest": 1}}}}]}, "prest"),
    ],
)
def test_a_wrong_study_is_refused_before_anything_is_made(tmp_path: Path, changes: dict, expected: str):
    with pytest.raises(UserError) as error:
        running.check(load(written(tiny(tmp_path, **changes), tmp_path)))
    assert expected in str(error.value)
    assert not (tmp_path / "studies").exists()
    assert not (tmp_path / "cache").exists()


def test_unknown_tables_are_refused_and_own_data_takes_one_path(tmp_path: Path):
    path = written(tiny(tmp_path), tmp_path)
    with pytest.raises(UserError, match="it has feed"):
        load(path, only=["fed"])
    assert load(path, ["base.training.epochs=7"]).base["training"] == {"epochs": 7, "patience": 2}
    own = load(path, data="data/mine")
    assert [table.data.path for table in own.tables] == ["data/mine"]
    assert own.tables[0].published == {}


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[2].glob("configs/study/*.yaml")), ids=lambda p: p.stem)
def test_shipped_studies_are_valid_in_every_point(path: Path):
    study = load(path)
    for table in study.tables:
        assert all(case.points for case in cases(study, table))
