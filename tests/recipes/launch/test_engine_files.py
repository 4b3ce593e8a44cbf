"""Files for accelerate, SkyPilot, dstack, Kubeflow and Docker: their schemas take them, and they start torchrun rightly."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from helpers.launchers.small_demo import ROOT
from torch.distributed.run import get_args_parser

LAUNCH = ROOT / "recipes" / "launch"
# variables of each engine on node 1 of two, as its documentation names them
NODE_1 = {
    "skypilot.yaml": {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_TASK_ID": "sky-1",
    },
    "dstack.yml": {
        "DSTACK_NODES_NUM": "2",
        "DSTACK_GPUS_PER_NODE": "8",
        "DSTACK_NODE_RANK": "1",
        "DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2",
        "DSTACK_MASTER_NODE_IP": "10.0.0.1",
        "DSTACK_RUN_NAME": "run",
    },
    "kubeflow_trainjob.yaml": {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "8",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "10.0.0.1",
        "PET_MASTER_PORT": "29500",
    },
}
RANK = {"skypilot.yaml": "SKYPILOT_NODE_RANK", "dstack.yml": "DSTACK_NODE_RANK", "kubeflow_trainjob.yaml": "PET_NODE_RANK"}


def read(name: str) -> Any:
    return yaml.safe_load((LAUNCH / name).read_text())


def command_of(name: str) -> tuple[str, dict[str, str]]:
    """The shell command that a node runs, and the variables that the file sets."""
    file = read(name)
    if name == "skypilot.yaml":
        return file["run"], file["envs"]
    if name == "dstack.yml":
        return file["commands"][-1], dict(each.split("=", 1) for each in file["env"])
    trainer = file["spec"]["trainer"]
    assert trainer["command"] == ["bash", "-c"]
    return trainer["args"][0], {each["name"]: each["value"] for each in trainer["env"]}


@pytest.mark.parametrize("node", ["0", "1"])
@pytest.mark.parametrize("name", NODE_1)
def test_a_node_starts_torchrun_with_its_engines_numbers(
    name: str, node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    torchrun.chmod(0o755)
    command, given = command_of(name)
    variables = {**NODE_1[name], RANK[name]: node, **given}
    if "ARGUMENTS" in given:
        variables["ARGUMENTS"] = "--learning_rate 2e-5"
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(["bash", "-eu", "-c", command], env={**variables, "PATH": path}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for variable, value in variables.items():
        if variable.startswith("PET_"):
            monkeypatch.setenv(variable, value)
    args = get_args_parser().parse_args(json.loads(run.stdout))
    assert (args.nnodes, args.nproc_per_node, args.max_restarts) == ("2", "8", 3)
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", "10.0.0.1:29500")
    assert args.rdzv_conf == f"is_host={int(node == '0')}" and args.rdzv_id and args.local_addr
    if name != "kubeflow_trainjob.yaml":
        assert args.local_addr == f"10.0.0.{int(node) + 1}"
        assert args.training_script_args[-4:-2] == ["--learning_rate", "2e-5"]
    assert args.training_script == "recipes/sft.py" and args.training_script_args[-2:] == ["--resume", "auto"]
    assert (ROOT / args.training_script_args[0]).is_file()
    # needed by restarts, see test_torchrun.py
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    # checkpoints are where the file mounts what all nodes see
    mounts = re.findall(r"/outputs\b", (LAUNCH / name).read_text())
    assert args.training_script_args[args.training_script_args.index("--output_dir") + 1].startswith("/outputs/")
    assert len(mounts) > 1


def test_skypilots_schema_takes_its_file() -> None:
    pytest.importorskip("sky")
    jsonschema = pytest.importorskip("jsonschema")
    from sky.utils import schemas

    file = read("skypilot.yaml")
    jsonschema.validate(file, schemas.get_task_schema())
    jsonschema.validate(file["resources"], schemas.get_resources_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**file, "nodes": 2}, schemas.get_task_schema())


def test_dstacks_models_take_its_file() -> None:
    pytest.importorskip("dstack")
    from dstack._internal.core.models.configurations import parse_apply_configuration

    file = read("dstack.yml")
    task = parse_apply_configuration(file)
    assert (task.nodes, task.resources.gpu.count.min, task.resources.gpu.name) == (2, 8, ["H100"])
    with pytest.raises(Exception, match="node_count"):
        parse_apply_configuration({**file, "node_count": 2})


def test_kubeflows_models_take_its_file_and_know_every_field() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    file = read("kubeflow_trainjob.yaml")
    job = models.TrainerV1alpha1TrainJob.from_dict(file)
    known = json.loads(json.dumps(job.to_dict(), default=str))
    # unknown fields are left out of it
    assert known == file


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "recipes" / "accelerate").glob("*.yaml")))
def test_accelerate_takes_its_files(name: str) -> None:
    """It raises for a key that it does not know."""
    config = load_config_from_file(str(ROOT / "recipes" / "accelerate" / name))
    assert config.num_processes == {"cpu.yaml": 2, "gpu.yaml": 8, "nodes.yaml": 16, "one_gpu.yaml": 1}[name]
    assert (config.num_machines, config.rdzv_backend) == ((2, "c10d") if name == "nodes.yaml" else (1, "static"))


@pytest.mark.quick
def test_the_dockerfile_copies_what_is_there_and_has_a_python_that_is_supported() -> None:
    lines = (LAUNCH / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split() for line in lines if line and not line.startswith("#")]
    assert [step[0] for step in steps] == ["FROM", "RUN", "WORKDIR", "COPY", "COPY", "COPY", "COPY", "RUN", "CMD"]
    version = re.fullmatch(r"python:3\.(\d+)-slim", steps[0][1])
    assert version and int(version[1]) >= 11
    for step in steps:
        if step[0] == "COPY":
            assert all((ROOT / source).exists() for source in step[1:-1])


def test_torchx_understands_the_documented_command() -> None:
    pytest.importorskip("torchx")
    guide = (ROOT / "docs" / "guides" / "launching.md").read_text()
    [command] = re.findall(r"^torchx run (?:.*\\\n)*.*", guide, re.MULTILINE)
    words = command.replace("\\\n", " ").split()
    assert words[:4] == ["torchx", "run", "-s", "slurm"] and "-j" in words
    run = subprocess.run(
        [sys.executable, "-m", "torchx.cli.main", "run", "--dryrun", *words[2:]], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "--nnodes 2 --nproc_per_node 8" in run.stdout and "--gpus-per-task=8" in run.stdout
    assert "recipes/sft.py recipes/configs/text.yaml --resume auto" in run.stdout
