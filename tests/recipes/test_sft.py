"""The recipe on two gloo ranks and real files, and plain transformers on the result."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.launchers import small_demo
from helpers.models.chats import TEMPLATE, byte_tokenizer, conversation
from helpers.models.versions import resuming
from helpers.ranks.forked import Program, free_port, rank_environment, run_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longctx.journal import read_journal
from hf_longctx.recipes.evaluate import plain_loss

ROOT = Path(__file__).parents[2]
SMALL = [*small_demo.SMALL, "--max_steps", "8"]


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the recipe on two ranks, with its output in `folder`."""
    environment = {"HF_DATASETS_CACHE": str(folder / "cache"), "ACCELERATE_MIXED_PRECISION": "no"}
    return run_ranks(ROOT / "recipes" / "sft.py", [*arguments, "--output_dir", str(folder / "out")], 2, folder, environment)


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The demo's own configuration with a smaller model and fewer steps; `.ci/run` starts the demo itself as README does."""
    folder = tmp_path_factory.mktemp("demo")
    return launch(folder, str(ROOT / "recipes" / "configs" / "demo.yaml"), *SMALL), folder / "out"


@pytest.mark.quick
def test_demo_prints_one_line_per_log_and_its_world(demo) -> None:
    run, _ = demo
    assert run.returncode == 0, run.stderr[-3000:]
    assert "2 ranks on cpu, gloo" in run.stdout
    lines = re.findall(r"step +\d+ \| loss .*", run.stdout)
    assert len(lines) == 8
    assert all(re.search(r"tokens/s \| padding .*% \| \d+ micro-batch", line) for line in lines)
    assert "predicted" not in lines[0] and "predicted" in lines[-1]
    # standard error is a file here, where bars would be printed anew around every line
    assert "it/s" not in run.stderr and "s/it" not in run.stderr and "examples/s" not in run.stderr and "\r" not in run.stderr
    # nothing is said twice, and nothing as a dictionary
    assert "{'" not in run.stdout and run.stdout.count("evaluation after step") == 2
    said = run.stdout.splitlines()
    assert len(said) == len(set(said))
    for number, beginning in enumerate(
        (
            *("2 ranks on cpu, gloo", "python-stdlib: ", "held out: ", "LlamaForCausalLM with ", "plans for 2 ranks on cpu: "),
            *("memory of a rank: ", "training: 8 steps; an epoch has ", "written to ", "attention: ", "self-test passed in "),
        )
    ):
        assert said[number].startswith(beginning), said[:12]
    assert re.search(r"sequence groups of 1 or 2; parameters replicated$", said[4])
    assert re.search(r"which take about [\d.]+ .*s \(a guess from rated speeds", said[6])
    # ranks have answered each other's questions at once
    assert "timed out" not in run.stderr and run.stderr.count("are longer than 512 tokens and were split") == 2
    assert any("<2>" in line and "<1x2>" in line for line in lines)
    before, after = re.search(r"perplexity: ([\d.]+) before, ([\d.]+) after", run.stdout).groups()
    assert float(after) < float(before)


def losses_of(run: subprocess.CompletedProcess[str]) -> list[float]:
    return [float(loss) for loss in re.findall(r"step +\d+ \| loss +([\d.]+) \|", run.stdout)]


@pytest.mark.wide
@pytest.mark.slow
def test_demo_in_bf16_and_with_shards_follows_it_in_fp32(demo, tmp_path: Path) -> None:
    config = str(ROOT / "recipes" / "configs" / "demo.yaml")
    run = launch(tmp_path, config, *SMALL, "--bf16", "true", "--parameters", "sharded")
    assert run.returncode == 0, run.stderr[-3000:]
    fp32, bf16 = losses_of(demo[0]), losses_of(run)
    assert bf16 != fp32 and len(bf16) == 8
    assert bf16 == pytest.approx(fp32, rel=0.03)


def test_demo_traces_its_last_steps(demo) -> None:
    run, folder = demo
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    assert {event["tid"] for event in events} == {0, 1}
    assert {"F", "B", "reduce"} <= {event["cat"] for event in events}
    assert f"hf-longctx report {folder}" in run.stdout


def test_demo_keeps_a_journal_that_counts_each_label_token_once(demo) -> None:
    _, folder = demo
    steps = read_journal(folder).of("step")
    assert [line["step"] for line in steps] == list(range(1, 9))
    # two ranks share sequences, whose first tokens alone are not learnt
    assert {"1", "2"} <= {degree for line in steps for degree in line["group_tokens"]}
    assert [line["labels"] for line in steps] == [line["tokens"] - sum(line["lengths"].values()) for line in steps]


def test_plain_transformers_get_the_same_held_out_loss(demo, tmp_path: Path) -> None:
    _, folder = demo
    run = run_ranks(ROOT / "recipes" / "evaluate.py", [str(folder)], 1, tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "hf_longctx" not in (ROOT / "recipes" / "evaluate.py").read_text()


@pytest.mark.wide
def test_checkpoint_and_json_lines_continue_under_adapters(demo, tmp_path: Path) -> None:
    _, checkpoint = demo
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"body": "word " * (5 + 20 * i)}) + "\n" for i in range(8)) + '{"body": ""}\n')
    run = launch(
        tmp_path,
        *("--model_name_or_path", str(checkpoint), "--dataset", str(documents), "--text_column", "body"),
        *(
            "--long_sequences",
            "truncate",
            "--max_steps",
            "2",
            "--use_cpu",
            "true",
            "--report_to",
            "none",
            "--save_strategy",
            "no",
        ),
        *("--lora_rank", "2", "--lora_targets", "q_proj", "down_proj", "--eval_documents", "2"),
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert re.search(r"0\.0 million parameters, 0\.0 million of them trained; 6 sequences of", run.stdout)
    assert "PeftModel.from_pretrained loads it onto the base model" in run.stdout
    out = tmp_path / "out"
    assert (out / "adapter_model.safetensors").exists() and not list(out.glob("model*"))
    # transformers finds the base model by the adapter's config
    held_out = json.loads((out / "held_out.json").read_text())
    assert plain_loss(out, held_out["input_ids"], held_out["input_ids"]) == pytest.approx(held_out["loss"], abs=1e-5)


def test_the_hybrid_demo_passes_its_self_test_and_learns(tmp_path: Path) -> None:
    """The hybrid demo's own model on fewer and shorter sequences."""
    fewer = ["--max_documents", "24", "--eval_documents", "2", "--max_document_chars", "1500", "--max_steps", "6"]
    shorter = ["--max_length", "512", "--tokens_per_rank", "384", "--tokens_per_step", "2048", "--calibration_steps", "2"]
    run = launch(tmp_path, str(ROOT / "recipes" / "configs" / "hybrid_demo.yaml"), *fewer, *shorter)
    assert run.returncode == 0, run.stderr[-3000:]
    assert len(re.findall(r"self-test passed in ", run.stdout)) == 1 and "ulysses of 2" not in run.stdout
    [passed] = re.findall(r"self-test passed in .*\n.*", read_journal(tmp_path / "out").of("start")[0]["opening"])
    assert "ulysses of 2" in passed and "slices" in passed
    assert "layers 0 (linear_attention), 3 (full_attention) of 4" in passed
    losses = losses_of(run)
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.3
    assert {"<2>", "<1x2>"} <= set(re.findall(r"<[\dx]+>", run.stdout))
    before, after = re.search(r"perplexity: ([\d.]+) before, ([\d.]+) after", run.stdout).groups()
    assert float(after) < float(before)


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A run on conversations, completions and text in one mix, with conversations of another file held out."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = byte_tokenizer(None)
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "template.jinja").write_text(TEMPLATE)
    turns = ["what is this?", "it is an answer", "to a question", "hello " * 40]
    chats = [{"messages": conversation(*(f"{turn} {i}" for turn in turns[: 2 + 2 * (i % 2)]))} for i in range(40)]
    asked = {"messages": conversation("no answer")}
    for name, rows in {"chats": [*chats[:30], asked], "held_out": chats[30:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "pairs.csv").write_text("prompt,completion\n" + "".join(f"one two {i},three four {i}\n" for i in range(20)))
    (folder / "lines.txt").write_text("".join(f"the cat sat on {i}\n" for i in range(20)))
    entries = [
        {"path": str(folder / "chats.jsonl"), "messages_column": "messages", "weight": 2},
        {"path": str(folder / "pairs.csv"), "prompt_column": "prompt", "completion_column": "completion", "weight": 1},
        {"path": str(folder / "lines.txt"), "text_column": "text", "weight": 1},
    ]
    held_out = {"path": str(folder / "held_out.jsonl"), "messages_column": "messages"}
    run = launch(
        folder,
        *("--model_config", small_demo.TINY.replace("259", str(len(tokenizer))), "--tokenizer", str(folder / "tokenizer")),
        *("--chat_template", str(folder / "template.jinja"), "--datasets", *map(json.dumps, entries)),
        *("--eval_dataset", json.dumps(held_out), "--tokens_per_step", "500", "--tokens_per_rank", "400", "--max_steps", "4"),
        *("--learning_rate", "1e-2", "--use_cpu", "true", "--report_to", "none", "--save_strategy", "no"),
    )
    return run, folder


@pytest.mark.wide
def test_chat_run_says_what_was_loaded_once(chat) -> None:
    run, folder = chat
    assert run.returncode == 0, run.stderr[-3000:]
    lines = run.stdout.splitlines()
    for name, count in {"chats.jsonl": 30, "pairs.csv": 20, "lines.txt": 20}.items():
        found = [line for line in lines if line.startswith(f"{folder / name}: {count} documents, ")]
        assert len(found) == 1 and re.search(r"[\d,]+ tokens, [\d.]+% with loss$", found[0])
    # 30 documents with weight 2 give 15 per unit of weight
    assert sum(line.startswith("mix (weights 2, 1, 1, first_exhausted): 60 documents") for line in lines) == 1
    assert run.stderr.count("1 of 31 rows are left out, because they have no message of the assistant") == 1
    assert "60 sequences of" in run.stdout
    # one cached result per operation, not per rank: three datasets tokenised; the text one also filtered and given labels
    assert len(list((folder / "cache").rglob("cache-*.arrow"))) == 6


def test_held_out_loss_of_a_chat_run_is_that_of_plain_transformers(chat) -> None:
    """Loss with model, tokenizer, template and mask of transformers alone, on the conversations in the file."""
    run, folder = chat
    assert run.returncode == 0, run.stderr[-3000:]
    model = AutoModelForCausalLM.from_pretrained(folder / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "out")
    losses: list[torch.Tensor] = []
    for line in (folder / "held_out.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        input_ids, learnt = torch.tensor(encoded["input_ids"]), torch.tensor(encoded["assistant_masks"]).bool()
        with torch.no_grad():
            logits = model(input_ids=input_ids.unsqueeze(0)).logits[0]
        losses.append(F.cross_entropy(logits[:-1], input_ids[1:], reduction="none")[learnt[1:]])
    plain = float(torch.cat(losses).double().mean())
    ours = json.loads((folder / "out" / "held_out.json").read_text())
    assert abs(plain - ours["loss"]) <= 1e-5
    # the loss over all tokens differs
    assert sum(label >= 0 for row in ours["labels"] for label in row) < sum(map(len, ours["input_ids"])) / 1.2
    assert abs(plain_loss(folder / "out", ours["input_ids"], ours["labels"]) - ours["loss"]) <= 1e-5


@pytest.mark.wide
@resuming
def test_a_signal_stops_the_recipe_and_the_same_command_goes_on(tmp_path: Path) -> None:
    demo, out, folder = str(ROOT / "recipes" / "configs" / "demo.yaml"), tmp_path / "stdout.txt", tmp_path / "out"
    # the demo's own run has passed it
    words = [demo, *SMALL, "--resume", "auto", "--self_test", "false"]
    command = [*words, "--output_dir", str(folder)]
    environment = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "ACCELERATE_MIXED_PRECISION": "no"}
    port, script, errors = free_port(), ROOT / "recipes" / "sft.py", tmp_path / "stderr.txt"
    ranks = [
        Program(script, [*command, "--max_steps", "2000"], {**environment, **rank_environment(rank, 2, port)}, out, errors)
        for rank in range(2)
    ]
    try:
        until_s = time.monotonic() + 150
        while "step    2 |" not in (out.read_text() if out.exists() else "") and time.monotonic() < until_s:
            time.sleep(0.05)
        ranks[1].send(signal.SIGUSR1)
        assert [each.wait(60) for each in ranks] == [0, 0], errors.read_text()[-3000:]
    finally:
        for each in ranks:
            each.kill()
    (step,) = map(int, re.findall(r"stopped by SIGUSR1 after step (\d+)", out.read_text()))
    assert "before, " not in out.read_text() and [each.name for each in folder.glob("checkpoint-*")] == [f"checkpoint-{step}"]
    again = launch(tmp_path, *words, "--max_steps", str(step + 1))
    assert again.returncode == 0, again.stderr[-3000:]
    # both runs write to one file
    assert re.findall(r"step +(\d+) \|", again.stdout)[-1] == str(step + 1)
    assert len(re.findall(r"step +1 \|", again.stdout)) == 1 and "checkpoint: " in again.stdout


def test_wrong_world_size_stops_at_once(tmp_path: Path) -> None:
    run = launch(tmp_path, str(ROOT / "recipes" / "configs" / "demo.yaml"), "--expected_world_size", "3")
    assert run.returncode != 0
    assert "2 rank(s) started, but expected_world_size is 3" in run.stderr


@pytest.mark.wide
def test_missing_text_column_is_named_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"content": "a"}\n')
    run = launch(
        tmp_path,
        *("--model_name_or_path", str(tmp_path / "none"), "--tokenizer", "bytes"),
        *("--dataset", str(tmp_path / "d.jsonl"), "--use_cpu", "true"),
    )
    assert run.returncode != 0
    # a launcher would print one
    assert run.stderr.count("data: dataset ") in (1, 2) and "has no column 'text'; it has content (set text_column)" in run.stderr
    assert "Traceback" not in run.stderr
