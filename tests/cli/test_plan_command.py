"""`hf-longctx plan` and `simulate`: the JSON they print, files they write, errors, and modules they never load."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_longctx.cli.main import main
from hf_longctx.hf.config import LongContextConfig
from hf_longctx.plan.core.messages import duration
from hf_longctx.plan.core.serialize import plan_from_json, plan_to_json
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.recipes.settings import read_settings
from hf_longctx.recipes.sft import RecipeArguments

FIXTURES = Path(__file__).parents[1] / "plan" / "fixtures"
MACHINE = ["--model", "llama-3.2-1b", "--gpus", "8", "--hardware", "h100"]


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    """A file of a dozen lengths."""
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, (9000, 4000, 3000, 2500, 1200, 900, 800, 700, 350, 120, 100, 90))))
    return str(path)


def printed(arguments: list[str], capsys) -> str:
    """Output of a command that must succeed."""
    assert main(arguments) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


@pytest.mark.wide
def test_json_is_all_that_is_printed_and_holds_what_a_script_needs(lengths: str, capsys) -> None:
    data = json.loads(printed(["plan", *MACHINE, "--lengths", lengths, "--json"], capsys))
    plan = validate_plan(plan_from_json(json.dumps(data["plan"])))
    assert sorted(plan.lengths)[-1] == 9000 and plan.num_ranks == 8
    assert 0 < data["estimate"]["lower_bound_s"] <= data["estimate"]["step_s"]
    assert {choice["name"] for choice in data["baselines"]} >= {"static", "BatchAda", "Megatron hybrid-CP", "FCP"}
    for choice in data["baselines"]:
        assert choice["step_s"] is None or choice["step_s"] >= data["estimate"]["lower_bound_s"] * (1 - 1e-9)
    assert data["planned_context_tokens"] == 8 * data["tokens_per_rank"] and data["planned_context_s"] > 0
    assert all(remedy["longest_tokens"] > data["planned_context_tokens"] for remedy in data["longer_context"])


@pytest.mark.wide
def test_without_a_number_of_gpus_one_is_meant(capsys) -> None:
    assert "qwen3-4b on 1 x NVIDIA" in printed(
        ["plan", "--model", "qwen3-4b", "--hardware", "rtx-4090", "--lora-rank", "16"], capsys
    )


@pytest.mark.wide
def test_without_lengths_the_longest_sequence_is_answered(capsys) -> None:
    data = json.loads(printed(["plan", *MACHINE, "--json"], capsys))
    assert data["longest_context_tokens"] == data["planned_context_tokens"] > 0 and data["longest_context_s"] > 0
    assert data["plan"] is None
    first, *rest = printed(["plan", *MACHINE], capsys).splitlines()
    answer = f"You can train sequences up to {data['planned_context_tokens']:,} tokens; a step with one takes "
    assert first == f"{answer}{duration(data['planned_context_s'])}." and len(rest) <= 10
    details = printed(["plan", *MACHINE, "--details"], capsys)
    assert details.startswith(first) and f"LONGEST SEQUENCE  {data['planned_context_tokens']:,} tokens" in details


def test_the_answer_fits_a_screen_and_says_what_steps_and_epochs_take_and_cost(lengths: str, capsys) -> None:
    arguments = ["plan", *MACHINE, "--lengths", lengths, "--global-batch", "4"]
    lines = printed(arguments, capsys).splitlines()
    assert len(lines) <= 11 and lines[0].startswith("You can train sequences up to ")
    data = json.loads(printed([*arguments, "--json", "--price-per-gpu-hour", "9"], capsys))
    step_s = data["mean"]["weights"]["most_step_s"]
    # gathers and the optimizer are in these seconds
    assert step_s > data["mean"]["step_s"] and data["mean"]["weights"]["update_s"] > 0
    [step] = [line for line in lines if line.startswith("  step ")]
    assert f"{duration(step_s)} for 4 sequences" in step and f"an epoch of 3 steps {duration(3 * step_s)}" in step
    [listed], [given] = (
        [line for line in printed([*arguments, *more], capsys).splitlines() if line.startswith("  price ")]
        for more in ([], ["--price-per-gpu-hour", "3600"])
    )
    assert "at $3.00 per GPU hour" in listed and f"${8 * step_s:,.2f} a step, ${24 * step_s:,.2f} an epoch" in given
    assert data["usd_per_gpu_hour"] == 9


@pytest.mark.wide("--model llama-3.1-8b --gpus 1 --hardware h200 --lora-rank 16 --quantize nf4-rows1")
@pytest.mark.parametrize(
    "command,rows",
    [
        # the three most effective options do not train all weights on these GPUs
        (
            "--model gemma-4-12b --gpus 4 --hardware rtx-pro-6000",
            [
                r"longer .*--lora-rank 16 \(.*; --optimizer-states host \(3\d\d,",
                r"links .*PCIe.*50 GB/s",
                r"price    \$0\.0\d+ for",
            ],
        ),
        (
            "--model llama-3.1-8b --gpus 1 --hardware h200 --lora-rank 16 --quantize nf4",
            [r"longer .*no --quantize \(1,1\d\d,\d{3}\), since attention over weights of four bits"],
        ),
        (
            "--model llama-3.1-8b --gpus 1 --hardware h200 --lora-rank 16 --frozen-weights fp8",
            [
                r"model .*LoRA of rank 16 over weights in fp8",
                r"longer .*no --frozen-weights \(1,1\d\d,\d{3}\), since attention over weights in fp8",
            ],
        ),
    ],
)
def test_the_answer_says_what_would_be_longer_and_how_ranks_are_linked(command: str, rows: list[str], capsys) -> None:
    text = printed(["plan", *command.split()], capsys)
    assert all(re.search(rf"^  {row}", text, re.MULTILINE) for row in rows), text


def test_models_and_hardware_are_listed(capsys) -> None:
    for kind, names in (("models", ("llama-3.1-8b", "gpt-30b", "granite-4.0-h-tiny")), ("hardware", ("h200", "rtx-3090"))):
        with pytest.raises(SystemExit) as ended:
            main(["plan", "--list", kind])
        assert ended.value.code == 0
        out = capsys.readouterr().out
        assert all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in names)


def test_a_model_of_the_hub_is_read_from_its_cache(tmp_path: Path, monkeypatch, capsys) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    folder = tmp_path / "models--acme--tiny" / "snapshots"
    for revision, positions in (("old", 512), ("new", 1024)):
        (folder / revision).mkdir(parents=True)
        (folder / revision / "config.json").write_text(json.dumps(sizes | {"max_position_embeddings": positions}))
    (tmp_path / "models--acme--tiny" / "refs").mkdir()
    (tmp_path / "models--acme--tiny" / "refs" / "main").write_text("old\n")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    arguments = ["plan", "--model", "acme/tiny", "--gpus", "1", "--hardware", "h100", "--json"]
    data = json.loads(printed(arguments, capsys))
    assert data["model"] == "acme/tiny" and data["max_positions"] == 512
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert "'tiny' is not known" in refused(arguments, capsys)


@pytest.mark.wide
def test_limits_have_the_trainer_s_name_too(lengths: str, capsys) -> None:
    both = [["--limit", "3000"], ["--max-length", "3000"]]
    texts = [printed(["plan", *MACHINE, "--lengths", lengths, *more], capsys) for more in both]
    assert texts[0] == texts[1] and "2 above 3,000 left out" in texts[0]


def longest(arguments: list[str], capsys) -> dict[str, dict[str, Any]]:
    """The rows of the longest sequence by their switches; a row with attention kept is named after the row before it."""
    rows = json.loads(printed(["plan", "--model", "llama-3.1-8b", *arguments, "--json"], capsys))["longest_context"]
    names = [row["switches"].strip() for row in rows]
    return {name if names.count(name) == 1 else f"{names[place - 1]}, {name}": rows[place] for place, name in enumerate(names)}


@pytest.mark.wide
def test_every_switch_of_the_engine_lengthens_the_longest_sequence(capsys) -> None:
    machine = ["--gpus", "1", "--hardware", "h200", "--lora-rank", "16"]
    rows = longest(machine, capsys)
    tokens = [row["tokens"] for name, row in rows.items() if "attention kept" not in name]
    assert tokens == sorted(set(tokens)) and len(tokens) == 7
    # keeping attention costs 12.6 KB of host memory per token and layer, and saves 1 / 4.5 of its seconds
    kept = [
        (row, list(rows.values())[place - 1]) for place, row in enumerate(rows.values()) if "attention kept" in row["switches"]
    ]
    assert len(kept) == 2 and all(row["tokens"] < before["tokens"] for row, before in kept)
    # host memory is that of the profile unless it is given
    assert "+ 116 GiB of host memory a rank" in rows
    assert longest([*machine, "--host-gib", str(125e9 / 2**30)], capsys) == rows
    more = longest([*machine, "--host-gib", "232"], capsys)
    assert more["+ 232 GiB of host memory a rank"]["tokens"] > rows["+ 116 GiB of host memory a rank"]["tokens"]


@pytest.mark.wide
def test_adapters_leave_more_room_than_all_weights_and_ranks_add_up(capsys) -> None:
    one, eight = ["--hardware", "h200", "--gpus", "1"], ["--hardware", "h200", "--gpus", "8"]
    runs = {"all": [*one, "--bf16-updates"], "lora": [*one, "--lora-rank", "16"], "eight": [*eight, "--lora-rank", "16"]}
    best = {name: max(row["tokens"] for row in longest(arguments, capsys).values()) for name, arguments in runs.items()}
    assert best["lora"] > 2 * best["all"]
    # exchanges within the group take memory
    assert 0.75 * 8 * best["lora"] < best["eight"] < 8 * best["lora"]


def test_host_memory_that_is_not_known_is_not_counted(tmp_path: Path, capsys) -> None:
    profile = json.loads((Path(__file__).parents[2] / "recipes" / "hardware" / "h100.json").read_text())
    profile["hardware"]["host_bytes"] = 0
    (tmp_path / "unknown.json").write_text(json.dumps(profile))
    machine = [*MACHINE[:-1], str(tmp_path / "unknown.json")]
    data = json.loads(printed(["plan", *machine, "--json"], capsys))
    assert data["host_bytes"] == 0 and not any("host" in row["switches"] for row in data["longest_context"])
    assert any("host memory is unknown" in note for note in data["notes"])
    given = json.loads(printed(["plan", *machine, "--host-gib", "64", "--json"], capsys))
    assert given["host_bytes"] == 2**36 and not any("host memory is unknown" in note for note in given["notes"])
    assert given["longest_context_tokens"] > data["longest_context_tokens"]


@pytest.mark.wide
def test_the_same_request_gives_the_same_plan_and_another_seed_another(capsys) -> None:
    arguments = ["plan", *MACHINE, "--lengths", "lognormal:6,1", "--global-batch", "40", "--steps", "1", "--json"]
    first, again, other = (json.loads(printed([*arguments, *seed], capsys)) for seed in ([], [], ["--seed", "1"]))
    assert first["plan"]["lengths"] == again["plan"]["lengths"] != other["plan"]["lengths"]
    assert first["plan"]["micro_batches"] == again["plan"]["micro_batches"]


@pytest.mark.wide
def test_options_reach_the_plan(lengths: str, capsys) -> None:
    options = ["--lengths", lengths, "--global-batch", "4", "--steps", "2", "--limit", "3000", "--degrees", "4,1,2"]
    options += [
        "--method",
        "ring",
        "--parameters",
        "sharded",
        "--shard-ranks",
        "4",
        "--tokens-per-rank",
        "2000",
        "--json",
        "--stages",
        "1",
    ]
    data = json.loads(printed(["plan", *MACHINE, *options, "--ranks-per-node", "4", "--dtype", "float32"], capsys))
    assert data["workload"]["num_dropped"] == 2 and data["workload"]["longest"] == 3000
    assert len(data["steps"]) == 2 and data["workload"]["global_batch"] == 4
    assert (data["degrees"], data["method"], data["tokens_per_rank"]) == ([1, 2, 4], "ring", 2000)
    assert (data["parameters"], data["shard_ranks"], data["ranks_per_node"]) == ("sharded", 4, 4)
    assert data["cost_model"]["model"]["bytes_per_element"] == 4
    methods = {group["method"] for mb in data["plan"]["micro_batches"] for group in mb["groups"]}
    assert methods <= {"local", "ring"} and "ring" in methods


@pytest.mark.wide
def test_spread_experts_are_priced(tmp_path: Path, capsys) -> None:
    config = {
        "num_hidden_layers": 8,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "vocab_size": 32000,
    }
    config |= {"max_position_embeddings": 32768, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["plan", "--model", str(tmp_path), "--gpus", "8", "--hardware", "h100", "--json"]
    arguments += ["--lengths", "lognormal:7,1", "--global-batch", "16", "--steps", "1", "--parameters", "sharded"]
    gathered, spread = (json.loads(printed([*arguments, *more], capsys)) for more in ([], ["--expert-ranks", "8"]))
    assert (spread["shard_ranks"], spread["cost_model"]["model"]["experts"]["num_ranks"]) == (8, 8)
    # two layers' experts and their gradients in bf16 are not gathered; tokens travel instead
    less = gathered["memory"]["state_bytes"] - spread["memory"]["state_bytes"]
    assert less == 2 * 2 * 2 * 3 * 64 * 2048 * 768
    assert spread["estimate"]["step_s"] > gathered["estimate"]["step_s"]
    # experts are most of what would be gathered
    one, other = (data["mean"]["weights"] for data in (gathered, spread))
    assert 0 < 3 * other["gather_s"] < one["gather_s"] and one["sum_s"] == other["sum_s"] == 0
    for data, weights in ((gathered, one), (spread, other)):
        step_s = data["mean"]["step_s"]
        assert (
            step_s
            <= weights["least_step_s"]
            <= weights["most_step_s"]
            == pytest.approx(step_s + weights["gather_s"] + weights["copies_s"] + weights["update_s"])
        )
    assert any("chosen equally often" in note for note in spread["notes"])
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(spread))
    assert json.loads(printed(["simulate", str(path), "--json"], capsys))["step_s"] > 0


@pytest.mark.wide
def test_a_static_solver_is_not_faster(lengths: str, capsys) -> None:
    ours, static = (
        json.loads(printed(["plan", *MACHINE, "--lengths", lengths, "--json", *more], capsys))["estimate"]["step_s"]
        for more in ([], ["--solver", "static"])
    )
    assert ours <= static * (1 + 1e-9)


@pytest.mark.wide
def test_programs_get_their_time_and_are_not_slower(lengths: str, capsys) -> None:
    greedy, milp = (
        json.loads(printed(["plan", *MACHINE, "--lengths", lengths, "--json", "--solver", *solver], capsys))["estimate"]
        for solver in (["greedy"], ["milp", "--solver-time-limit", "0.5"])
    )
    assert milp["solver"].startswith("milp") and greedy["solver"] == "greedy"
    assert milp["step_s"] <= greedy["step_s"] * (1 + 1e-9)


def test_files_are_written_and_simulated_again(lengths: str, tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "forecast"
    text = printed(["plan", *MACHINE, "--lengths", lengths, "--output", str(folder)], capsys)
    assert {path.name for path in folder.iterdir()} == {"plan.json", "report.txt", "timeline.png", "trace.json", "lengths.png"}
    assert (folder / "report.txt").read_text().startswith(text.splitlines()[0])
    details = printed(["plan", *MACHINE, "--lengths", lengths, "--details"], capsys)
    # planning takes other seconds each time
    report, again = (re.sub(r"planned in \S+ \S+ ", "", each) for each in ((folder / "report.txt").read_text(), details))
    assert report == again
    data = json.loads((folder / "plan.json").read_text())
    simulated = json.loads(printed(["simulate", str(folder / "plan.json"), "--json"], capsys))
    assert simulated["step_s"] == pytest.approx(data["estimate"]["step_s"], rel=1e-12)
    assert max(rank["peak_bytes"] for rank in simulated["ranks"]) == data["estimate"]["peak_bytes"]
    assert "micro-batch 0" in printed(["show", str(folder / "plan.json")], capsys)
    again = tmp_path / "again"
    assert "waiting" in printed(["simulate", str(folder / "plan.json"), "--output", str(again)], capsys)
    assert {path.name for path in again.iterdir()} == {"report.txt", "timeline.png", "trace.json"}


def saved_plan(lengths: str, tmp_path: Path, capsys) -> tuple[Path, dict[str, Any]]:
    """A bare plan without cost model, and the forecast that it comes from."""
    data = json.loads(printed(["plan", *MACHINE, "--lengths", lengths, "--json"], capsys))
    path = tmp_path / "plan.json"
    path.write_text(plan_to_json(plan_from_json(json.dumps(data["plan"]))))
    return path, data


@pytest.mark.wide
def test_a_plan_alone_is_priced_by_options(lengths: str, tmp_path: Path, capsys) -> None:
    path, data = saved_plan(lengths, tmp_path, capsys)
    arguments = ["simulate", str(path), "--model", "llama-3.2-1b", "--json"]
    same = json.loads(printed([*arguments, "--hardware", "h100"], capsys))
    assert same["step_s"] == pytest.approx(data["estimate"]["step_s"])
    # an A100 computes at about a third of the rate
    slower = json.loads(printed([*arguments, "--hardware", "a100-80g"], capsys))
    assert slower["step_s"] > 1.5 * same["step_s"]


@pytest.mark.wide
def test_a_forecast_may_be_simulated_on_other_hardware(lengths: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "forecast.json"
    path.write_text(printed(["plan", *MACHINE, "--lengths", lengths, "--json"], capsys))
    same = json.loads(printed(["simulate", str(path), "--json"], capsys))
    slower = json.loads(printed(["simulate", str(path), "--hardware", "a100-80g", "--json"], capsys))
    assert slower["step_s"] > 1.5 * same["step_s"]


def refused(arguments: list[str], capsys) -> str:
    """Error output of a command that must fail, without a traceback and with nothing on standard output."""
    assert main(arguments) == 1
    output = capsys.readouterr()
    assert output.out == "" and "Traceback" not in output.err
    return output.err


@pytest.mark.wide("changes6-leave these out with --limit", "changes16-leave --tokens-per-rank out", "changes4-does not fit")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--model", "gpt-8b"], "gpt-7b"),
        (["--hardware", "abacus"], "'abacus' is neither a shipped profile"),
        (["--gpus", "0"], "--gpus is 0"),
        (["--gpus", "12"], "set --ranks-per-node to a divisor of --gpus"),
        (["--model", "qwen3-32b", "--gpus", "1"], "does not fit"),
        (["--lengths", "nowhere.txt"], "'nowhere.txt', which does not exist"),
        (["--lengths", "lognormal:17,0.1", "--steps", "1"], "leave these out with --limit"),
        (["--lengths", "LENGTHS", "--limit", "10"], "longer than the limit of 10 tokens"),
        (["--lengths", "LENGTHS", "--global-batch", "13"], "a step of 13 sequences was asked for, but"),
        (["--lengths", "LENGTHS", "--global-batch", "0"], "--global-batch is 0"),
        (["--lengths", "LENGTHS", "--steps", "0"], "--steps is 0"),
        (["--lengths", "LENGTHS", "--degrees", "0,1"], "give positive numbers of ranks"),
        (["--lengths", "LENGTHS", "--solver", "magic"], "solver 'magic' is not one of"),
        (["--lengths", "LENGTHS", "--solver-time-limit", "0"], "solver_time_limit_s is 0.0"),
        (["--degrees", "1,16"], "degree 16 needs 16 ranks"),
        (["--tokens-per-rank", "-3"], "--tokens-per-rank is -3"),
        (["--lengths", "LENGTHS", "--tokens-per-rank", "100"], "leave --tokens-per-rank out"),
        (["--shard-ranks", "3"], "--shard-ranks 3 does not divide the 8 ranks"),
        (["--lora-rank", "-1"], "--lora-rank is -1"),
        (["--quantize", "nf4"], "--quantize freezes all weights, so nothing would be trained; give --lora-rank"),
        (["--quantize", "int8", "--lora-rank", "4"], "--quantize is 'int8'; give nf4"),
        (["--frozen-weights", "fp8"], "--frozen-weights fp8 rounds weights that are not trained; give --lora-rank"),
        (["--frozen-weights", "fp8", "--lora-rank", "4", "--quantize", "nf4"], "pack the same weights; leave one of them out"),
        (["--frozen-weights", "fp8", "--lora-rank", "4", "--dtype", "float32"], "is counted for models in bf16 with attention"),
        (["--host-gib", "-2"], "--host-gib is -2"),
        (["--dtype", "int8"], "dtype 'int8' is not one of bfloat16, float32"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(changes: list[str], message: str, lengths: str, capsys) -> None:
    changes = [lengths if word == "LENGTHS" else word for word in changes]
    error = refused(["plan", *MACHINE, *changes], capsys)
    # changes that would help have lines of their own
    assert error.startswith("hf-longctx plan: ") and error.count("\n") == 1 + error.count("\n  ")
    assert message in error


def test_a_plan_that_lacks_its_prices_says_which_option_to_add(lengths: str, tmp_path: Path, capsys) -> None:
    path, _ = saved_plan(lengths, tmp_path, capsys)
    assert "add --model NAME" in refused(["simulate", str(path)], capsys)
    assert "add --hardware NAME" in refused(["simulate", str(path), "--model", "llama-3.2-1b"], capsys)
    other = refused(["simulate", str(path), "--model", "qwen3-8b", "--hardware", "h100"], capsys)
    assert "a model of 16 layers, but the cost model is for 36" in other


def test_a_plan_that_breaks_a_rule_is_not_simulated(tmp_path: Path, capsys) -> None:
    path = tmp_path / "plan.json"
    path.write_text((FIXTURES / "nested.json").read_text().replace("[1, 0, 8000]", "[1, 0, 7000]"))
    assert "tokens 7000 to 8000 are never planned" in refused(["simulate", str(path)], capsys)
    assert "No such file" in refused(["simulate", str(tmp_path / "nowhere.json")], capsys)


def test_numbers_that_are_none_end_with_status_two(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *MACHINE, "--degrees", "one"])
    assert ended.value.code == 2
    assert "'one' is not a whole number; give a list of numbers such as 1,2,4,8" in capsys.readouterr().err


def modules_after(arguments: list[str]) -> set[str]:
    """The top-level modules that a process has loaded after a command."""
    code = (
        "import sys; from hf_longctx.cli.main import main\n"
        "try: status = main(sys.argv[1:])\n"
        "except SystemExit as end: status = end.code\n"
        "assert not status, status\n"
        "print('MODULES', *{name.partition('.')[0] for name in sys.modules})"
    )
    ended = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return set(ended.stdout.splitlines()[-1].split()[1:])


HEAVY = {"torch", "transformers", "accelerate", "datasets", "peft", "triton", "pandas", "scipy"}


def test_help_loads_no_numerical_package() -> None:
    assert not modules_after(["plan", "--help"]) & (HEAVY | {"numpy", "matplotlib", "pulp", "pyarrow"})


@pytest.mark.wide
def test_a_plan_loads_no_framework_and_draws_only_when_asked(lengths: str, tmp_path: Path) -> None:
    loaded = modules_after(["plan", *MACHINE, "--lengths", lengths])
    assert "numpy" in loaded and not loaded & (HEAVY | {"matplotlib", "pyarrow"})
    pytest.importorskip("matplotlib")
    drawn = modules_after(["plan", *MACHINE, "--lengths", lengths, "--output", str(tmp_path / "out")])
    assert "matplotlib" in drawn and not drawn & HEAVY


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = [sys.executable, "-m", "hf_longctx.cli.main", "show", str(FIXTURES / "flexsp.json")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    process.wait(timeout=60)
    process.stderr.close()
    assert error == b""


ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "how-long.md").read_text()


@pytest.mark.wide
@pytest.mark.parametrize("text", [GUIDE, (ROOT / "README.md").read_text()], ids=["guide", "readme"])
def test_documents_show_what_their_command_prints(text: str, capsys) -> None:
    command = next(line for line in text.splitlines() if line.startswith("hf-longctx plan"))
    shown = text.split(command)[1].split("```text\n")[1].split("```")[0]
    data = json.loads(printed([*command.split()[1:], "--json"], capsys))
    # the planner may improve, but then these numbers must be printed again
    assert float(shown.split("STEP  ")[1].split()[0]) == pytest.approx(data["mean"]["step_s"], rel=0.03)
    assert float(shown.split("and this memory: ")[1].split()[0]) == pytest.approx(data["mean"]["lower_bound_s"], rel=0.005)
    assert f"LONGEST SEQUENCE  {data['planned_context_tokens']:,} tokens" in shown
    rows = {choice["name"]: choice for choice in data["mean"]["baselines"] if choice["name"] in shown}
    assert set(rows) >= ({"static"} if text is not GUIDE else {"static", "BatchAda", "FCP", "Megatron hybrid-CP"})
    for name, choice in rows.items():
        row = next(line for line in shown.splitlines() if line.strip().startswith(name))
        assert float(row.split(" s ")[0].split()[-1]) == pytest.approx(choice["step_s"], rel=0.05)


@pytest.mark.wide
def test_the_guide_shows_the_longest_sequence_of_its_second_command(capsys) -> None:
    _, command, *_ = (line for line in GUIDE.splitlines() if line.startswith("hf-longctx plan"))
    shown = GUIDE.split("```text\n")[2].split("```")[0].split("...\n")[1].strip()
    assert shown.startswith("LONGEST SEQUENCE") and shown in printed(command.split()[1:], capsys)


@pytest.mark.wide
def test_a_plan_above_what_is_kept_names_its_policies_and_is_simulated_with_the_same_seconds(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    lengths, folder = tmp_path / "lengths.txt", tmp_path / "forecast"
    lengths.write_text("40000\n3000\n500\n")
    machine = ["--model", "llama-3.2-1b", "--gpus", "1", "--hardware", "h100", "--host-gib", "32", "--steps", "1"]
    text = printed(["plan", *machine, "--lengths", str(lengths), "--details", "--output", str(folder)], capsys)
    data = json.loads((folder / "plan.json").read_text())
    assert data["kept_tokens_per_rank"] < 40000 < data["tokens_per_rank"] and data["memory_use"]["num_chosen"] == 1
    assert data["memory_use"]["reason"] and f"  {data['memory_use']['reason']}\n" in text
    # the others hold these lengths with checkpointing, and take longer
    assert all(choice["checkpointing"].endswith("checkpointing") for choice in data["baselines"])
    assert all(choice["step_s"] > data["estimate"]["step_s"] for choice in data["baselines"])
    memory = data["memory"]
    assert memory["state_bytes"] + memory["activation_peak_bytes"] == data["estimate"]["peak_bytes"] <= memory["usable_bytes"]
    simulated = json.loads(printed(["simulate", str(folder / "plan.json"), "--json"], capsys))
    assert simulated["step_s"] == pytest.approx(data["estimate"]["step_s"], rel=1e-12)
    [rank] = simulated["ranks"]
    assert (rank["peak_bytes"], rank["host_bytes"]) == (data["estimate"]["peak_bytes"], data["estimate"]["host_bytes"])
    assert "under policies" in printed(["simulate", str(folder / "plan.json")], capsys)
    kept = refused(["plan", *machine, "--lengths", str(lengths), "--activations", "keep"], capsys)
    assert "has 40000 tokens" in kept.replace(",", "")


@pytest.mark.wide
@pytest.mark.parametrize("options", ["--lora-rank 16 --quantize nf4 --method ring", "--method hybrid", "--gpus 48 --method ring"])
def test_the_longest_sequence_of_a_ring_is_one_that_a_plan_holds(options: str, capsys) -> None:
    # planned with the bytes of rings, or refused
    arguments = ["plan", "--model", "llama-3.1-8b", "--gpus", "8", "--hardware", "h100", "--parameters", "sharded"]
    data = json.loads(printed([*arguments, *options.split(), "--json"], capsys))
    assert data["planned_context_tokens"] > 0 and data["planned_context_s"] > 0
    assert data["planned_context_tokens"] == data["longest_context_tokens"]


def test_a_class_that_runs_cannot_recompute_is_promised_no_more_than_it_keeps(tmp_path: Path, capsys) -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    sizes |= {"vocab_size": 49152, "max_position_embeddings": 131072}
    # the class has no kernels, and a Llama has
    machine = ["--gpus", "8", "--hardware", "h100", "--no-compile-layers"]

    def planned(kind: str, *more: str) -> tuple[dict[str, Any], str]:
        (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": kind}))
        arguments = ["plan", "--model", str(tmp_path), *machine, *more]
        return json.loads(printed([*arguments, "--json"], capsys)), printed(arguments, capsys)

    kept, text = planned("gpt_neox_japanese")
    given, _ = planned("llama", "--activations", "keep")
    free, other = planned("llama")
    # its MLPs have no gate, and so fewer weights than a Llama's
    assert kept["planned_context_tokens"] == pytest.approx(given["planned_context_tokens"], rel=0.03)
    assert given["planned_context_tokens"] < kept["planned_context_tokens"] < free["planned_context_tokens"] / 2
    assert [row["switches"] for row in kept["longest_context"]] == ["everything kept, as Hugging Face does"]
    assert kept["longest_context_tokens"] <= kept["planned_context_tokens"] and len(free["longest_context"]) > 1
    [line] = [line for line in text.splitlines() if line.startswith("  kept ")]
    assert line.endswith("it has no layer of class GradientCheckpointingLayer") and "  kept " not in other
    arguments = ["plan", "--model", str(tmp_path), *machine, "--lengths", "lognormal:6,1", "--global-batch", "8", "--ablation"]
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "gpt_neox_japanese"}))
    assert "--ablation compares plans that recompute activations" in refused(arguments, capsys)


TOO_LARGE = {
    "--gpus": ["1000000000", "9" * 40],
    "--global-batch": ["100000000000"],
    "--steps": ["100000000000"],
    "--tokens-per-rank": ["1" * 30],
    "--host-gib": ["nan", "inf", "1e300"],
    "--solver-time-limit": ["nan"],
    "--degrees": ["1," + "9" * 30],
}


@pytest.mark.parametrize("option", TOO_LARGE)
def test_a_number_beyond_any_machine_is_refused_at_once(option: str, capsys) -> None:
    for value in TOO_LARGE[option]:
        with pytest.raises(SystemExit):
            main(["plan", *MACHINE, option, value])
        assert option in (said := capsys.readouterr().err) and "Traceback" not in said and len(said) < 3000


def test_an_unexpected_error_is_one_line_unless_it_is_debugged(monkeypatch, tmp_path: Path, capsys) -> None:
    file = tmp_path / "plan.json"
    file.write_text((FIXTURES / "flexsp.json").read_text())
    monkeypatch.setattr("hf_longctx.plan.core.validate.describe_plan", lambda plan: 1 // 0)
    assert main(["show", str(file)]) == 3
    said = capsys.readouterr().err
    assert said.startswith("hf-longctx show: unexpected ZeroDivisionError: ") and said.count("\n") == 1
    with pytest.raises(ZeroDivisionError):
        main(["--debug", "show", str(file)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus=--"], "argument --gpus: '--' is no value"),
        (["--host-gib", "x" * 5000], "argument --host-gib: '" + "x" * 30 + "' is not a number"),
        (["--gpus", "1000000000"], "argument --gpus: 1000000000 is too large; give at most 16384"),
        (["--gpus", "2", "--host-gib", "half"], "argument --host-gib: 'half' is not a number"),
    ],
)
def test_a_number_that_is_none_is_refused_by_the_name_of_its_option(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--model", "gpt-7b", "--hardware", "h100", *words])
    last = capsys.readouterr().err.strip().split("\n")[-1]
    assert last.endswith(message)


@pytest.mark.wide
def test_the_place_of_optimizer_states_is_chosen_and_said(tmp_path: Path, capsys) -> None:
    machine = ["plan", "--model", "llama-3.1-8b", "--hardware", "a100-40g", "--parameters", "sharded", "--json"]

    def planned(gpus: int, place: str, *more: str) -> dict[str, Any]:
        options = ["--gpus", str(gpus), "--host-gib", "64", "--optimizer-states", place, *more]
        return json.loads(printed([*machine, *options], capsys))

    for gpus, place in ((8, "host"), (16, "device")):
        # nothing but the note differs
        chosen, given = planned(gpus, "auto"), planned(gpus, place)
        (note,) = (note for note in chosen["notes"] if note.startswith("optimizer states: "))
        assert (
            note.startswith(f"optimizer states: on the {place}; ")
            and "GiB" in note
            and "the longest sequence has 131,072" in note
        )
        chosen["notes"].remove(note)
        assert chosen == given
    assert main([*machine, "--gpus", "4", "--host-gib", "8", "--optimizer-states", "auto"]) == 1
    assert "does not fit" in capsys.readouterr().err


@pytest.mark.daily("--bf16-updates-optim_args: bf16_stochastic_round=True")
@pytest.mark.parametrize(
    ("options", "words"), [("", "optim: adamw_torch_8bit"), ("--bf16-updates", "optim_args: bf16_stochastic_round=True")]
)
def test_the_next_step_names_an_optimizer_of_few_bits(options: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["plan", "--model", "llama-3.1-8b", "--gpus", "8", "--hardware", "h100", "--optim", "adamw_torch_8bit"]
    *_, last = printed([*machine, *options.split()], capsys).splitlines()
    assert words in last.partition("to train so: ")[2].split(", ")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--parameters sharded --optimizer-states host", "parameters sharded optimizer_states host host_gib 101"),
        ("--parameters sharded --optimizer-states auto", "parameters sharded host_gib 116"),
        ("--layer-weights host", "parameters sharded layer_weights host host_gib 114"),
        (
            "--hardware rtx-4090 --parameters sharded --optimizer-states auto --host-gib 64",
            "parameters sharded optimizer_states host host_gib 48",
        ),
        ("--parameters replicated --tokens-per-rank 9000 --lora-rank 8", "lora_rank 8 tokens_per_rank 9000 host_gib 116"),
        ("--parameters sharded --shard-ranks 4 --bf16-updates", "parameters sharded shard_ranks 4 fp32_master_weights False"),
        ("--lora-rank 16 --frozen-weights fp8", "lora_rank 16 frozen_weights fp8 parameters sharded host_gib 116"),
        ("--lora-rank 16 --quantize nf4 --method ulysses", "lora_rank 16 load_in_4bit True parameters sharded method ulysses"),
        (
            "--activations keep --parameters sharded --degrees 1,4 --solver lp",
            "activations keep parameters sharded solver lp degrees [1,4]",
        ),
        ("--dtype float32 --parameters sharded", "dtype float32 parameters sharded"),
    ],
)
def test_the_next_step_names_every_setting_that_the_answer_rests_on(
    options: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = ["plan", "--model", "llama-3.1-8b", "--gpus", "8", "--hardware", "h100", *options.split()]
    *_, last = printed(machine, capsys).splitlines()
    tokens = json.loads(printed([*machine, "--json"], capsys))["planned_context_tokens"]
    lines = re.sub(r", (?=[a-z])", "\n", last.partition("to train so: ")[2])
    (tmp_path / "run.yaml").write_text(f"{lines}\nmodel_name_or_path: llama\ndataset: rows.jsonl\n")
    # the recipe reads them; its four bits need a package that tests go without
    monkeypatch.setattr("hf_longctx.recipes.sft.find_spec", lambda name: True)
    recipe, config = read_settings((RecipeArguments, LongContextConfig), [str(tmp_path / "run.yaml")])
    assert config.max_length == tokens and (recipe.rope_scaling == "yarn") == (tokens > 131072)
    words = expected.split()
    wanted = {"dtype": "bfloat16", **dict(zip(words[::2], words[1::2], strict=True))}
    defaults = (RecipeArguments(model_name_or_path="llama", dataset="rows.jsonl"), LongContextConfig())
    for settings, plain in zip((recipe, config), defaults, strict=True):
        for name, value in vars(settings).items():
            if name in ("max_length", "rope_scaling"):
                continue
            if name == "host_gib" and name in wanted:
                assert float(wanted[name]) <= value <= float(wanted[name]) + 1, value
            elif name in wanted:
                assert str(value).replace(" ", "") == wanted[name], name
            elif name != "host_gib":
                assert value == getattr(plain, name), name
