"""The page of a tiny real run, which was resumed: its numbers, and every chart drawn in headless Chromium at two widths."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import datasets
import pytest
from helpers.models.reference import random_rows
from helpers.models.tiny_models import ModelCase
from helpers.trainers.trainer_runs import make_trainer
from soak.mutated_files import START

from hf_longctx import LongContextEvaluation, NeedleTask
from hf_longctx.cli.main import main
from hf_longctx.journal import JOURNAL, Journal, append_lines, read_journal
from hf_longctx.page.charts import loss_chart
from hf_longctx.page.history import length_counts, steps_of, thinned

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
STEPS, SAVED = 6, 3
# a step takes all rows; one of them is not learnt
ROWS = random_rows([13, 21, 8, 34, 16, 5, 30, 9], masked=(2,))
CHARTS = {"loss", "speed", "seconds", "bytes", "mfu", "shares", "layouts", "lengths", "positions", "where", "timeline"}
CHARTS |= {"needles-1", "needles-2"}


def needle(length: int, depth: float, chance: random.Random) -> tuple[list[int], int]:
    return [chance.randrange(64) for _ in range(length)], 2


def train(folder: Path, resume_from: str | None = None) -> None:
    config = {"calibration_steps": 1, "timeline_steps": 2}
    arguments = {"max_steps": STEPS, "save_steps": SAVED, "save_strategy": "steps", "logging_steps": 2}
    trainer = make_trainer(ModelCase("llama"), ROWS, str(folder), config, arguments)
    held_out = datasets.Dataset.from_list(random_rows([40, 33, 20], seed=3))
    needles = NeedleTask((24, 48), (0.0, 0.5, 1.0), needle, 2)
    trainer.add_callback(LongContextEvaluation(trainer, held_out, needles, first_bucket=4))
    trainer.train(resume_from_checkpoint=resume_from)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run that was stopped after its last step and resumed from the middle."""
    folder = tmp_path_factory.mktemp("run")
    train(folder)
    train(folder, str(folder / f"checkpoint-{SAVED}"))
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Path:
    assert main(["report", str(folder), "--peak-tflops", "0.01"]) == 0
    return folder / "report.html"


@pytest.mark.wide
def test_a_resumed_run_has_every_step_once_and_every_label_token_once(folder: Path) -> None:
    written = [json.loads(line) for line in (folder / JOURNAL).read_text().splitlines()]
    assert sum(line["kind"] == "step" for line in written) == STEPS + STEPS - SAVED
    journal = read_journal(folder)
    steps = steps_of(journal)
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    learnt = sum(label != -100 for row in ROWS for label in row.get("labels", row["input_ids"])[1:])
    assert 0 < learnt < sum(len(row["input_ids"]) - 1 for row in ROWS)
    assert {step.labels for step in steps} == {learnt}
    assert {step.tokens for step in steps} == {sum(len(row["input_ids"]) for row in ROWS)}
    assert sum(length_counts(journal).values()) == STEPS * len(ROWS)
    # 8 to 11 tokens are class 6, since 2^3 = 8
    assert length_counts(journal)[6] == STEPS * 2


def test_the_parts_of_a_step_add_up(folder: Path) -> None:
    for step in steps_of(read_journal(folder)):
        assert step.wall_s is not None and step.wall_s >= step.measured_s + step.plan_wait_s - 1e-3
        assert sum(step.seconds.values()) <= step.measured_s + 1e-6
        assert step.solve_s > 0 and step.operations > 0


def test_main_numbers_as_json(folder: Path, capsys) -> None:
    assert main(["report", str(folder), "--peak-tflops", "0.01", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    steps = steps_of(read_journal(folder))
    seconds = sum(step.wall_s for step in steps)
    assert numbers["steps"] == STEPS and numbers["label_tokens"] == sum(step.labels for step in steps)
    assert numbers["tokens_per_s"] == pytest.approx(sum(step.tokens for step in steps) / seconds)
    assert numbers["mfu"] == pytest.approx(sum(step.operations for step in steps) / seconds / 0.01e12)


def test_the_page_loads_nothing_and_says_what_it_shows(page: Path) -> None:
    text = page.read_text()
    own = text[: text.index("<script>")] + text[text.rindex("</style>") :].split("</script>", 1)[1]
    assert not re.search(r"""(src|href)=["']?https?:""", own)
    assert "resumed 1 time" in own and "model operations = tokens" in own and "calibration_steps" in own
    assert "not ended yet" not in own


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1400, 420])
def test_a_browser_draws_every_chart_without_errors(page: Path, tmp_path: Path, width: int) -> None:
    # a window of Chromium has at least 500 pixels, so the narrow page stands in a frame
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<body style="margin:0"><iframe id="page" width="{width}" height="900"></iframe><pre id="found"></pre><script>'
        "const frame = document.getElementById('page'); const tell = () => { const inner = frame.contentDocument;"
        "if (!inner.body || !inner.body.dataset.drawn) { setTimeout(tell, 100); return; }"
        "setTimeout(() => { const charts = [...inner.querySelectorAll('.chart')].map((c) => [c.id,"
        "c.querySelectorAll('.main-svg').length > 0 && c.querySelectorAll('.trace, .point, .heatmaplayer image').length > 0,"
        "c.querySelector('.main-svg').getBoundingClientRect().width <= c.clientWidth + 1]);"
        "document.getElementById('found').textContent = JSON.stringify([charts, inner.body.scrollWidth]); }, 500); };"
        f"frame.onload = tell; frame.src = '{page.as_uri()}';</script>"
    )
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--enable-logging=stderr",
    ]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=60000", "--dump-dom", frame.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "CONSOLE" not in run.stderr, run.stderr
    found = re.search(r'<pre id="found">(\[.*\])</pre>', run.stdout)
    assert found, run.stdout[-2000:] + run.stderr[-2000:]
    charts, scroll_width = json.loads(found[1])
    assert {name for name, *_ in charts} == CHARTS
    assert [name for name, is_drawn, _ in charts if not is_drawn] == []
    assert [name for name, _, fits in charts if not fits] == [] and scroll_width <= width


@pytest.mark.quick
@pytest.mark.parametrize(
    ("lines", "message"),
    [([], "has no journal.jsonl"), ([START], "has no finished step yet")],
)
def test_a_folder_without_steps_is_refused(tmp_path: Path, capsys, lines, message: str) -> None:
    if lines:
        append_lines(tmp_path, lines)
    assert main(["report", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err


def test_a_long_run_is_thinned_to_means(folder: Path) -> None:
    steps = steps_of(read_journal(folder))
    (first, second) = thinned(steps, 2)
    assert (first.step, second.step) == (3, 6)
    assert first.loss == pytest.approx(sum(step.loss for step in steps[:3]) / 3)
    assert thinned(steps) == steps


@pytest.mark.quick
def test_each_of_several_held_out_sets_has_a_curve_of_its_own() -> None:
    logs = [{"eval_a_loss": 2.0 - step, "eval_b_loss": 1.0, "eval_needle_loss": 5.0, "eval_loss_at_4_7": 3.0} for step in (0, 1)]
    lines = [{"kind": "log", "step": step, "logs": each} for step, each in enumerate(logs)]
    journal = Journal(tuple(lines), 0)
    traces = {each["name"]: each["y"] for each in loss_chart([], journal).traces[1:]}
    assert traces == {"held out: a": [2.0, 1.0], "held out: b": [1.0, 1.0]}


def test_a_journal_that_cannot_be_written_does_not_stop_the_training(tmp_path: Path, caplog) -> None:
    (tmp_path / JOURNAL).mkdir()
    trainer = make_trainer(ModelCase("llama"), ROWS, str(tmp_path), {}, {"max_steps": 2})
    trainer.train()
    assert trainer.state.global_step == 2
    assert sum("the journal in" in record.getMessage() for record in caplog.records) == 1
