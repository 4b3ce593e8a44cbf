"""Ready configs fit the hardware that they name, by the plan that they name; their samples are read and tokenised."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from helpers.models.chats import byte_tokenizer
from transformers import TrainingArguments

from hf_longctx import LongContextConfig
from hf_longctx.cli.main import build_parser
from hf_longctx.cli.plan import request_of
from hf_longctx.plan.cost.profiles import normal_name
from hf_longctx.recipes.settings import read_settings
from hf_longctx.recipes.sft import RecipeArguments
from hf_longctx.recipes.sources import load_tokens
from hf_longctx.sim.output.summary import run_settings
from hf_longctx.sim.scenario import build_scenario

RECIPES = Path(__file__).parents[2] / "recipes"
MODELS = sorted((RECIPES / "models").glob("*.yaml"))
TASKS = sorted((RECIPES / "tasks").glob("*/config.yaml"))
# settings of a file that decide what fits, besides max_length and rope_scaling
DECISIVE = (
    "dtype",
    "lora_rank",
    "lora_experts",
    "pack_experts",
    "load_in_4bit",
    "parameters",
    "stages",
    "shard_ranks",
    "expert_ranks",
    "optim",
    "optimizer_states",
)
DECISIVE += ("fp32_master_weights", "activations", "host_gib", "method", "degrees", "tokens_per_rank", "solver")


def named(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.daily(
    "models/gemma-4-31b-full",
    "models/gemma-4-31b-lora",
    "models/gpt-oss-20b-lora",
    "models/llama-3.1-8b-full",
    "models/mistral-7b-full",
    "models/qwen3-0.6b-full",
    "models/qwen3-0.6b-lora",
    "models/qwen3-30b-a3b-lora",
    "models/qwen3-8b-full",
    "models/qwen3.5-9b-full",
    "models/qwen3.5-9b-lora",
    "agents/config",
    "text/config",
)
@pytest.mark.parametrize("path", [*MODELS, *TASKS], ids=named)
def test_a_ready_config_fits_the_hardware_that_it_names(path: Path) -> None:
    text = path.read_text()
    [command] = re.findall(r"^#   hf-longctx (plan .*)$", text, re.MULTILINE)
    settings = yaml.safe_load(text)
    options = build_parser().parse_args(shlex.split(command))
    scenario = build_scenario(request_of(options, settings["max_length"]))
    assert scenario.longest_tokens >= settings["max_length"]
    # beyond the model's own positions, a run needs scaled ones; within them it refuses to scale
    assert ("rope_scaling" in settings) == (settings["max_length"] > scenario.costs.model.max_positions)
    # assumptions of the plan are the settings of the run
    forecast = {name: value for name, value in run_settings(scenario).items() if name in DECISIVE}
    chosen = {name: str(settings[name]) for name in DECISIVE if name in settings}
    assert forecast == {name: value.replace("True", "true") for name, value in chosen.items()}
    assert normal_name(Path(settings["model_name_or_path"]).name).startswith(normal_name(options.model))


NODES = sorted((RECIPES / "models").glob("*-nodes.yaml"))


@pytest.mark.parametrize("path", NODES, ids=named)
def test_a_config_for_several_nodes_starts_a_rank_on_each_gpu_of_its_plan(path: Path) -> None:
    text = path.read_text()
    [command] = re.findall(r"^#   hf-longctx (plan .*)$", text, re.MULTILINE)
    num_gpus = build_parser().parse_args(shlex.split(command)).gpus
    settings, own = yaml.safe_load(text), str(path.relative_to(RECIPES.parent))
    [batch] = re.findall(r"^#   sbatch (.*)$", text, re.MULTILINE)
    script, nodes = (RECIPES / "launch" / "slurm.sbatch").read_text(), int(shlex.split(batch)[1])
    [per_node] = re.findall(r"^#SBATCH --gpus-per-node=(\d+)$", script, re.MULTILINE)
    assert shlex.split(batch)[:4] == ["--nodes", str(nodes), "recipes/launch/slurm.sbatch", own]
    assert nodes * int(per_node) == num_gpus and settings["stages"] == nodes
    [started] = re.findall(r"^#   accelerate launch (.*)$", text, re.MULTILINE)
    launch = launch_command_parser().parse_args(shlex.split(started))
    assert (launch.num_machines, launch.num_processes, launch.machine_rank) == (nodes, num_gpus, 0)
    assert (RECIPES.parent / launch.config_file).is_file() and launch.training_script == "recipes/sft.py"
    assert launch.training_script_args == [own, "--dataset", "my.jsonl"]
    # every rank reads its own stage of a checkpoint in a folder
    assert settings["model_name_or_path"] in re.findall(r"--local-dir (\S+)$", text, re.MULTILINE)


@pytest.mark.wide
def test_ready_configs_and_their_samples_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # shipped files are found in the package, from every folder
    monkeypatch.chdir(tmp_path)
    chatml = (RECIPES / "configs" / "chatml.jinja").read_text()
    read: set[tuple[str, ...]] = set()
    for path in (*MODELS, *TASKS):
        all_settings = (RecipeArguments, LongContextConfig, TrainingArguments)
        recipe, config, args = read_settings(all_settings, [str(path), "--use_cpu", "true"])
        assert config.max_length and args.output_dir.startswith("outputs/")
        assert recipe.chat_template is None or Path(recipe.chat_template).read_text() == chatml
        files = tuple(source.path for source in recipe.sources)
        if files not in read:
            # the checkpoint's tokenizer is not here
            found = load_tokens(recipe.sources, byte_tokenizer(chatml), seed=0, held_out=recipe.eval_documents)
            assert len(found.train) > 0
            assert all(any(label >= 0 for label in row.get("labels", row["input_ids"])) for row in found.train)
        read.add(files)


def test_every_folder_of_a_task_has_a_config_a_sample_and_a_page() -> None:
    # rows with images are made by code, in recipes/images.py
    for folder in {*(RECIPES / "tasks").iterdir()} - {RECIPES / "tasks" / "images"}:
        kinds = {file.suffix for file in folder.iterdir()}
        assert {".yaml", ".jsonl", ".md"} <= kinds, folder
    page = (RECIPES / "models" / "README.md").read_text()
    assert [path.name for path in MODELS] == sorted(re.findall(r"\]\(([\w.-]+\.yaml)\)", page))
