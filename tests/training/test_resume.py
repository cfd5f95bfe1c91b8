"""What cannot be trained is refused before Ray starts, and a run that never started does not keep its name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from invdist import config as configs
from invdist import train
from invdist.config.defaults import OWN_DATA
from invdist.config.plain_yaml import parse, to_yaml
from invdist.data.dataset import Dataset
from invdist.runtime.errors import UserError
from invdist.training import data_checks, ray_backend, run_folder
from invdist.training.build import phases_of
from invdist.training.checkpoint import Position
from invdist.training.history import epoch_of
from invdist.training.resume import check_continues, check_resume, described


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_backend, "connected", lambda *_: pytest.fail("Ray was started"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model=neumf", "was trained with model=gmf, which cannot change"),
        ("method=none", "method=ig"),
        ("rows.dim=16", "rows.dim=8"),
        ("rows.bias=false", "rows.bias=True"),
        ("rows.optimizer=sgd", "rows.optimizer=adam"),
        ("training.metric=gauc", "training.metric=auc"),
    ],
)
def test_another_model_is_refused_from_the_manifest_alone(
    trained_run: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    assert train.main(["--resume", str(trained_run), override]) == 2
    assert said in capsys.readouterr().err


def test_another_data_set_is_refused_and_more_epochs_are_not(
    trained_run: Path, all_labeled: Path, tiny_data: Path
) -> None:
    config, _ = run_folder.reopen(trained_run, ["training.epochs=9", "optimizer.gamma=0.1"])
    check_resume(config, trained_run, Dataset.open(str(tiny_data)))
    with pytest.raises(UserError, match="was trained on another data set"):
        check_resume(config, trained_run, Dataset.open(str(all_labeled)))


@pytest.mark.parametrize("model", ["gmf", "neumf"])
def test_tables_beyond_the_caps_are_refused(
    tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    given = [f"data.path={tiny_data}", f"runs={tmp_path / 'runs'}", f"model={model}", "rows.dim=100000000"]
    assert train.main(given) == 2
    assert "rows.dim: 100000000 makes a model of" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_tables_beyond_the_memory_of_this_machine_are_refused(tiny_data: Path) -> None:
    dataset = Dataset.open(str(tiny_data))
    config = configs.from_mapping({}, [f"data.path={tiny_data}", "rows.dim=32", "rows.optimizer=sgd"])
    tables = 4 * (dataset.users + dataset.items) * 32
    assert data_checks.model_bytes(config, dataset) == tables + 4 * 33  # GMF: 32 weights and a bias
    data_checks.check_fits_host(config, dataset, memory=tables + 4 * 33)
    with pytest.raises(UserError, match=r"rows.dim: 32 makes a model .* this machine has"):
        data_checks.check_fits_host(config, dataset, memory=tables)
    config.rows.optimizer = "adam"
    assert data_checks.model_bytes(config, dataset) == 3 * (tables + 4 * 33)


@pytest.mark.parametrize(("error", "left"), [(UserError("no"), []), (RuntimeError("no"), ["named.failed"])])
def test_a_run_that_failed_before_its_first_step_does_not_keep_its_name(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, left: list[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(ray_backend, "connected", fail)
    config = configs.from_mapping({}, [f"data.path={tiny_data}", f"runs={tmp_path}", "name=named"])
    with pytest.raises(type(error)):
        train.train(config)
    assert [path.name.partition("-")[0] for path in tmp_path.iterdir()] == left


def test_a_run_that_has_started_keeps_its_folder(trained_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    run_folder.release_name(run, keep=False)
    assert (run / "metrics.jsonl").exists()


def test_a_checkpoint_belongs_to_the_epoch_that_events_name() -> None:
    assert epoch_of(Position()) == 0
    assert epoch_of(Position(epoch=3, global_step=30)) == 2, "saved at the end of epoch 2"
    assert epoch_of(Position(epoch=3, phase=1, global_step=35)) == 3, "saved within epoch 3"


def test_training_without_a_data_set_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([]) == 2
    assert "give data.path=FOLDER" in capsys.readouterr().err
    assert train.main(["data.path=somewhere", "--print-config"]) == 0
    printed = configs.from_text(capsys.readouterr().out)
    assert configs.dump(printed) == configs.dump(configs.load(OWN_DATA, ["data.path=somewhere"]))


def test_checkpoints_of_earlier_versions_go_on_within_an_epoch(tiny_data: Path) -> None:
    """Their phases have one field more, and their settings do not know of exposure vectors."""
    config = configs.from_mapping({"data": {"path": str(tiny_data)}, "method": "ig"})
    dataset = Dataset.open(str(tiny_data))
    phases = phases_of(config, dataset)
    settings = parse(configs.dump(config).encode(), "settings")
    del settings["exposures"]
    saved = [phase | {"epochs": None} for phase in described(phases)]
    extra = {"dataset": dataset.fingerprint, "config": to_yaml(settings), "phases": saved}
    check_continues("old", Position(step=5), extra, config, dataset, phases)
    changed = configs.from_mapping({"data": {"path": str(tiny_data)}, "method": "ig", "ig": {"turns": 2}})
    with pytest.raises(UserError, match=r"ig.turns=1"):
        check_continues("old", Position(step=5), extra, changed, dataset, phases_of(changed, dataset))
    config.exposures.vectors = True
    with pytest.raises(UserError, match=r"exposures.vectors=False"):
        check_continues("old", Position(step=5), extra, config, dataset, phases)
    extra["config"] = configs.dump(config)
    config.exposures.dim = 32
    with pytest.raises(UserError, match=r"exposures.dim=64, which cannot change"):
        check_continues("new", Position(), extra, config, dataset, phases)


def test_the_products_of_a_grown_run_stay_where_they_decide_its_vectors(tiny_data: Path) -> None:
    dataset = Dataset.open(str(tiny_data))
    for run, vectors, kept in (("runs/monday", True, True), ("runs/monday", False, False), (None, True, False)):
        given = {"data": {"path": str(tiny_data)}, "growth": {"run": run}, "exposures": {"vectors": vectors}}
        config = configs.from_mapping(given)
        extra = {"dataset": dataset.fingerprint, "config": configs.dump(config)}
        config.growth.products += 1
        phases = phases_of(config, dataset)
        if not kept:
            check_continues("grown", Position(), extra, config, dataset, phases)
            continue
        with pytest.raises(UserError, match=r"growth.products=3, which decides its vectors"):
            check_continues("grown", Position(), extra, config, dataset, phases)


def test_the_size_of_a_model_counts_the_columns_of_vectors(tiny_data: Path) -> None:
    dataset = Dataset.open(str(tiny_data))
    rows = dataset.users + dataset.items
    given = {"data": {"path": str(tiny_data)}, "rows": {"dim": 8}}
    exposures = {"vectors": True, "dim": 16, "learned": 16, "hidden": 4}
    config = configs.from_mapping(given | {"exposures": exposures})
    # GMF's 8 columns and those of the head with two moments each; vectors and counts are frozen.
    features = 3 * 16 + 2
    dense = 9 + 16 * 16 + (features + 1) + (features + 1) * 4 + 4
    expected = 4 * (3 * (rows * (8 + 4 + 16) + dense) + rows * (16 + 4))
    assert data_checks.model_bytes(config, dataset) == expected
    # Many learned columns take more than the model that reads few of them.
    config.exposures.learned = 1000
    assert data_checks.model_bytes(config, dataset) == 4 * rows * ((1000 + 64 + 4) + (1000 + 4))


def test_a_run_has_numbers_for_what_is_auto_before_ray_starts(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[configs.Config] = []

    def stop(*_: object) -> None:
        written.append(configs.load(tmp_path / "runs" / "mine" / run_folder.CONFIG_FILE))
        raise UserError("far enough")

    monkeypatch.setattr(ray_backend, "connected", stop)
    assert train.main([f"data.path={tiny_data}", f"runs={tmp_path / 'runs'}", "name=mine"]) == 2
    (config,) = written
    assert config.data.batch_size == Dataset.open(str(tiny_data)).rows["train"] // 25
    assert isinstance(config.optimizer.gamma, float)
    assert config.exposures.vectors
