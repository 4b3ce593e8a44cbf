"""Odd values of settings: each is taken, or refused in one line that names the setting, within a bound on seconds and memory.

python tests/soak/odd_values.py --count 5000 --seed 0 --trained 40

Half of them are fields of `LongContextConfig`, a quarter settings of the recipe in a YAML file or on the command line, and a
quarter numbers of `hf-longctx plan`. Some of the configs that were taken also train a step.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
import transformers

from hf_longctx import LongContextConfig, LongContextTrainer
from hf_longctx.cli.main import main as command
from hf_longctx.recipes.settings import read_settings
from hf_longctx.recipes.sft import RecipeArguments

LONGEST_S, MOST_BYTES = 5.0, 2**30
NUMBERS = [-1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**40, 2**53, 2**63, 10**25, 10**300, 10**5000, -(10**30)]
FLOATS = [0.5, 1.7, -0.0, 1e-320, 1e9, 1e308, float("nan"), float("inf"), -float("inf")]
WORDS = ["", " ", "7", "07", "-1", "1e3", "1_0", "٣", "0x10", "nan", "inf", "all", "auto", "None", "true", "a\nb", "x" * 5000]
WORDS += ["--", "-", "{", "[1, 2]", "{}", "9" * 5000, "\x00", "é\u2028", "%s", "/", "1,2", "1:60", "2020-99-99", "!!python/none"]
ODD = [None, True, False, [], [1], [0], [1.5], ["2"], ["all", 2], [[1]], (2,), {1}, {}, {"a": 1}, b"1", object, Decimal("1.5")]
ODD += [Fraction(1, 3), 1j, np.int64(4), np.int32(-4), np.float32("nan"), np.array([1, 2]), torch.tensor(2), [2] * 10**5, len]
FIELDS = [field.name for field in dataclasses.fields(LongContextConfig)]
PLAN = ["--model", "gpt-7b", "--gpus", "4", "--hardware", "h100", "--lengths", "lognormal:7,1"]
PLAN += ["--global-batch", "8", "--steps", "1", "--solver", "greedy"]
PLAN_NUMBERS = ["gpus", "ranks-per-node", "limit", "global-batch", "steps", "seed", "shard-ranks", "lora-rank", "host-gib"]
PLAN_NUMBERS += ["degrees", "solver-time-limit", "tokens-per-rank", "lengths"]
RECIPE = ["--dataset", "x", "--model_name_or_path", "y", "--use_cpu", "true", "--report_to", "none"]
# numbers of the recipe, and some of those of transformers
RECIPE_NUMBERS = ["lora_rank", "lora_alpha", "max_document_chars", "max_documents", "eval_documents", "needle_lengths"]
RECIPE_NUMBERS += ["needle_depths", "needle_documents", "expected_world_size"]
RECIPE_NUMBERS += ["learning_rate", "max_steps", "logging_steps", "seed", "per_device_train_batch_size", "warmup_steps"]


def config_value(generator: random.Random) -> str:
    """Sets a field of a config; returns "taken" or "refused"."""
    name, value = generator.choice(FIELDS), generator.choice(NUMBERS + FLOATS + WORDS + ODD)
    try:
        # the class or the field, as users set them
        config = LongContextConfig(**{name: value})
        known = dataclasses.replace(config)
        config.check()
        assert repr(config) == repr(known) and json.dumps(dataclasses.asdict(config))
    except ValueError as error:
        return refused(str(error), name)
    return "taken"


def recipe_value(generator: random.Random, folder: Path) -> str:
    """Reads a setting of the recipe from a YAML file or from words; returns "taken" or "refused"."""
    name = generator.choice(RECIPE_NUMBERS + FIELDS)
    words = list(RECIPE)
    value = str(generator.choice(NUMBERS[:-2] + FLOATS + WORDS))
    if generator.random() < 0.5:
        words += [f"--{name}", value] if generator.random() < 0.5 else [f"--{name}={value}"]
        what = name
    else:
        file = folder / "config.yaml"
        text = generator.choice([value, json.dumps(value), f"[{value}]", f"{{a: {value}}}", f"- {value}", f"&a [*a, {value}]"])
        file.write_text(f"{name}: {text}\n", encoding="utf-8", errors="surrogatepass")
        words, what = [str(file), *words], f"{name}|{file.name}"
    try:
        read_settings((RecipeArguments, LongContextConfig, transformers.TrainingArguments), [*words, "--output_dir", str(folder)])
    except SystemExit as error:
        return refused(str(error), *what.split("|"))
    return "taken"


def plan_value(generator: random.Random, folder: Path) -> str:
    """Plans with a number of the command line; returns "taken" or "refused"."""
    name = generator.choice(PLAN_NUMBERS)
    value = str(generator.choice([*NUMBERS[:-2], *FLOATS, *WORDS, 48]))
    if name == "lengths" and generator.random() < 0.7:
        file = folder / "lengths.txt"
        file.write_text(generator.choice([value, f"5\n{value}", f"5 {value}", f"length count\n{value} 5"]), errors="replace")
        value = str(file)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            status = command(["plan", *PLAN, f"--{name}={value}"])
    except SystemExit as error:
        # argparse also prints how the command is used
        return refused(errors.getvalue().strip().split("\n")[-1], f"--{name}") if error.code == 2 else "taken"
    if status == 0:
        return "taken"
    assert status == 1, errors.getvalue()
    return refused(errors.getvalue().strip(), "hf-longctx plan: ")


def refused(message: str, *names: str) -> str:
    """Checks that an error is one line, with changes that would help below it, and has one of the names in it."""
    # changes that would help stand below, one on each line
    head, *changes = message.split("\n")
    assert head and len(message) < 2000 and all(each.startswith("  ") for each in changes), message[:3000]
    assert any(name in message for name in names), f"none of {names} in {message!r}"
    return "refused"


def train_one_step(generator: random.Random, folder: Path) -> str:
    """Trains a step with a number that the config takes; returns "trained" or "refused"."""
    config, settings = None, {}
    while config is None:
        settings = {generator.choice(FIELDS): generator.choice(NUMBERS[2:-2] + FLOATS[:6]) for _ in range(2)}
        with contextlib.suppress(ValueError):
            config = LongContextConfig(**{"report_steps": False, "timeline_steps": 0, **settings})
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, max_position_embeddings=512))
    arguments = {"output_dir": str(folder), "use_cpu": True, "max_steps": 1, "per_device_train_batch_size": 4}
    arguments |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    rows = [{"input_ids": [n % 64 for n in range(length)]} for length in (3, 9, 40, 17)]
    try:
        args = transformers.TrainingArguments(**arguments)
        trainer = LongContextTrainer(model=model, args=args, train_dataset=rows, longctx_config=config)
        trainer.train()
    except ValueError as error:
        # device_gib is named by its value, beside what has no room in it
        known = [*settings, f"{config.device_gib} GiB"]
        assert any(name in str(error) for name in known), f"{settings}: {error}"
        return "refused"
    except BaseException as error:
        raise AssertionError(f"{settings}: {error!r}") from error
    return "trained"


def soak(count: int, seed: int, num_trained: int, folder: Path) -> Counter[str]:
    """Outcomes of `count` odd values; raises AssertionError on a traceback, or where seconds are above their bound."""
    generator = random.Random(seed)
    tries: list[Callable[[], str]] = [
        lambda: config_value(generator),
        lambda: recipe_value(generator, folder),
        lambda: config_value(generator),
        lambda: plan_value(generator, folder),
    ]
    found: Counter[str] = Counter()
    for number in range(count + num_trained):
        state = generator.getstate()
        start_s = time.process_time()
        is_trained = number >= count
        kind = "step" if is_trained else ("config", "recipe", "config", "plan")[number % 4]
        try:
            outcome = train_one_step(generator, folder) if is_trained else tries[number % 4]()
            seconds = time.process_time() - start_s
            assert seconds < LONGEST_S, f"took {seconds:.1f} s"
        except BaseException as error:
            generator.setstate(state)
            drawn = [generator.choice(FIELDS), generator.choice(NUMBERS + FLOATS + WORDS + ODD)] if kind == "config" else ""
            raise AssertionError(f"seed {seed}, {kind} {number} {str(drawn)[:200]}: {error!r:.1500}") from error
        found[f"{kind} {outcome}"] += 1
    return found


def limit_memory() -> None:
    """Limits what this process allocates from now on."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    most = int(fields["VmData"].split()[0]) * 1024 + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trained", type=int, default=40, help="steps that are trained with values that a config takes")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    limit_memory()
    with tempfile.TemporaryDirectory() as name:
        result = soak(options.count, options.seed, options.trained, Path(name))
    print(dict(result), "none above", LONGEST_S, "s or", MOST_BYTES, "bytes")
    sys.exit(0)
