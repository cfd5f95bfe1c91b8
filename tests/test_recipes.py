"""Recipes for clusters: valid by the schemas of Ray and Kubernetes, their commands and settings real."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from invdist import config, train
from tests.conftest import REPOSITORY

LAUNCH = REPOSITORY / "launch"


def _commands(file: Path) -> list[list[str]]:
    """Every `python -m invdist...` of a recipe, comments and folded lines included, as arguments."""
    text = file.read_text()
    if file.name == "rayjob.yaml":
        text += yaml.safe_load(text)["spec"]["entrypoint"]
    found = re.findall(r"python -m (invdist\.\w+[^'\"\n`]*)", text)
    return [shlex.split(command.split("#")[0]) for command in found]


def _inside_checkout(path: str) -> str:
    return str(REPOSITORY / "configs" / Path(path).name)


@pytest.mark.parametrize("name", ["ray-cluster.yaml", "rayjob.yaml", "../README.md"])
def test_commands_of_the_recipes_exist_and_their_settings_too(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    trained = 0
    for module, *arguments in _commands(LAUNCH / name):
        assert importlib.util.find_spec(module) is not None, module
        missing = [a for a in arguments if a.startswith("configs/") and not (REPOSITORY / a).exists()]
        assert missing == []
        if module == "invdist.train" and "--config" in arguments:
            at = arguments.index("--config") + 1
            arguments[at] = _inside_checkout(arguments[at])
            assert train.main([*arguments, "--print-config"]) == 0
            assert config.from_text(capsys.readouterr().out).ray.ranks > 0
            trained += 1
    assert trained


def test_the_ray_cluster_recipe_follows_rays_schema_and_flags() -> None:
    import ray
    from ray.scripts.scripts import start

    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    recipe = yaml.safe_load((LAUNCH / "ray-cluster.yaml").read_text())
    jsonschema.validate(recipe, schema)
    assert recipe["head_node_type"] in recipe["available_node_types"]
    known = {option for parameter in start.params for option in parameter.opts}
    for command in recipe["head_start_ray_commands"] + recipe["worker_start_ray_commands"]:
        used = set(re.findall(r"--[a-z-]+", command))
        assert used <= known, command
    # rsync takes a pattern without a slash in front for a name at any depth: invdist/data would stay behind.
    assert all(pattern.startswith("/") for pattern in recipe["rsync_exclude"])
    gpus = 4 * recipe["available_node_types"]["gpu"]["max_workers"]
    assert config.load(REPOSITORY / "configs" / "multi-gpu.yaml").ray.workers <= gpus


_POD = {
    "type": "object",
    "required": ["spec"],
    "additionalProperties": False,
    "properties": {
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "required": ["containers"],
            "additionalProperties": False,
            "properties": {
                "containers": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["name", "image", "resources"],
                        "additionalProperties": False,
                        "properties": {
                            "name": {"type": "string"},
                            "image": {"type": "string"},
                            "resources": {
                                "type": "object",
                                "additionalProperties": False,
                                "required": ["requests", "limits"],
                                "properties": {
                                    side: {"type": "object", "additionalProperties": {"type": "string"}}
                                    for side in ("requests", "limits")
                                },
                            },
                            "volumeMounts": {
                                "type": "array",
                                "items": {"type": "object", "required": ["name", "mountPath"]},
                            },
                        },
                    },
                },
                "volumes": {"type": "array", "items": {"type": "object", "required": ["name"]}},
            },
        },
    },
}
_START = {"type": "object", "additionalProperties": {"type": "string"}}
# The fields of ray.io/v1 RayJob that the recipe may use, from KubeRay's API reference.
_RAYJOB: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["entrypoint", "rayClusterSpec"],
            "properties": {
                "entrypoint": {"type": "string"},
                "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
                "shutdownAfterJobFinishes": {"type": "boolean"},
                "ttlSecondsAfterFinished": {"type": "integer"},
                "backoffLimit": {"type": "integer"},
                "rayClusterSpec": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["rayVersion", "headGroupSpec", "workerGroupSpecs"],
                    "properties": {
                        "rayVersion": {"type": "string"},
                        "authOptions": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {"mode": {"const": "token"}},
                        },
                        "headGroupSpec": {
                            "type": "object",
                            "additionalProperties": False,
                            "required": ["rayStartParams", "template"],
                            "properties": {
                                "serviceType": {"enum": ["ClusterIP"]},
                                "rayStartParams": _START,
                                "template": _POD,
                            },
                        },
                        "workerGroupSpecs": {
                            "type": "array",
                            "minItems": 1,
                            "items": {
                                "type": "object",
                                "additionalProperties": False,
                                "required": ["groupName", "replicas", "rayStartParams", "template"],
                                "properties": {
                                    "groupName": {"type": "string"},
                                    "replicas": {"type": "integer"},
                                    "minReplicas": {"type": "integer"},
                                    "maxReplicas": {"type": "integer"},
                                    "rayStartParams": _START,
                                    "template": _POD,
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}


def test_the_rayjob_manifest_is_valid_and_has_the_gpus_it_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    import ray
    from ray.scripts.scripts import start

    manifest = yaml.safe_load((LAUNCH / "rayjob.yaml").read_text())
    jsonschema.validate(manifest, _RAYJOB)
    cluster = manifest["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"].rpartition(".")[0] == ray.__version__.rpartition(".")[0]
    assert cluster["authOptions"] == {"mode": "token"}
    known = {option.removeprefix("--") for parameter in start.params for option in parameter.opts}
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        assert set(group["rayStartParams"]) <= known
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    worker = cluster["workerGroupSpecs"][0]
    limits = worker["template"]["spec"]["containers"][0]["resources"]["limits"]
    module, *arguments = shlex.split(manifest["spec"]["entrypoint"])[2:]
    arguments[1] = _inside_checkout(arguments[1])
    assert train.main([*arguments, "--print-config"]) == 0
    asked = config.from_text(capsys.readouterr().out).ray
    assert module == "invdist.train"
    assert worker["replicas"] * int(limits["nvidia.com/gpu"]) == asked.workers
    assert worker["replicas"] * int(limits["cpu"]) >= asked.ranks * asked.cpus_per_worker
