"""Settings come from one YAML file and `--key value` overrides; settings that do not fit are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.measures.calls import counted_calls
from helpers.models.any_model import build_any
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, TrainingArguments

from hf_longctx import LongContextConfig
from hf_longctx.hf.models.rope import rope_problems
from hf_longctx.recipes import sft
from hf_longctx.recipes.settings import given_settings, read_settings
from hf_longctx.recipes.sft import RecipeArguments, check_fit, load_model, with_adapters, with_cuts

ALL = (RecipeArguments, LongContextConfig, TrainingArguments)
FILE = """
dataset: documents.jsonl
model_config: {model_type: llama, hidden_size: 8}
max_length: 100
degrees: [1, 2]
learning_rate: 1e-3
save_strategy: "no"
use_cpu: true
max_documents:
report_to: none
"""


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(FILE)
    return str(path)


@pytest.mark.quick
def test_file_gives_values_of_the_right_type(config_file: str) -> None:
    recipe, config, args = read_settings(ALL, [config_file])
    assert config.max_length == 100 and config.degrees == [1, 2]
    # YAML 1.1 reads 1e-3 as text; argparse makes it a number
    assert args.learning_rate == 1e-3
    assert recipe.model_config == '{"model_type": "llama", "hidden_size": 8}'
    assert recipe.max_documents is None


def test_command_line_wins_over_the_file(config_file: str) -> None:
    _, config, args = read_settings(ALL, [config_file, "--max_length", "7", "--learning_rate", "0.5", "--degrees", "1"])
    assert (config.max_length, args.learning_rate, config.degrees) == (7, 0.5, [1])


def test_command_line_alone_is_enough() -> None:
    recipe, _, args = read_settings(ALL, ["--dataset", "x", "--model_name_or_path", "y", "--use_cpu", "true"])
    assert recipe.dataset == "x" and args.use_cpu


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--max_lenght", "7"], "unknown setting '--max_lenght'; did you mean --max_length"),
        (["--max_length", "long"], "invalid int value: 'long'"),
        (["--long_sequences", "drop"], "long_sequences"),
        (["--logging_steps", "inf"], "cannot convert float infinity to integer; check --logging_steps"),
        (["--logging_steps", "9" * 400], "check --logging_steps"),
        (["--lora_rank=--"], "--lora_rank has the value '--'"),
        (["--max_length", "7", "8"], "'8' follows the one value that --max_length takes"),
        (["--max_length", "9" * 5000], "argument --max_length/--max-length: invalid int value"),
    ],
)
def test_bad_words_are_refused_in_one_line(config_file: str, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message) as error:
        read_settings(ALL, [config_file, *arguments])
    assert "\n" not in str(error.value)


def test_values_that_a_dataclass_refuses_are_said_without_a_traceback(config_file: str) -> None:
    with pytest.raises(SystemExit, match="settings: max_length is 0; give a positive number"):
        read_settings(ALL, [config_file, "--max_length", "0"])
    with pytest.raises(SystemExit, match="settings: model_config is not valid JSON"):
        read_settings(ALL, [config_file, "--model_config", "{a"])


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--lora_rank", "-1"], "lora_rank is -1; give a positive rank, or 0 to train all weights"),
        (["--lora_alpha", "16"], "lora_alpha has no effect without adapters; set lora_rank, or leave it out"),
        (["--lora_targets", "q_proj"], "lora_targets has no effect without adapters"),
        (["--lora_rank", "4", "--lora_alpha", "0"], "lora_alpha is 0.0; give more than 0 or leave it out"),
        (["--load_in_4bit", "true"], "load_in_4bit freezes all weights, so nothing is left to train; set lora_rank"),
    ],
)
def test_settings_of_adapters_that_cannot_be_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        read_settings(ALL, ["--dataset", "x", "--model_name_or_path", "y", *arguments])


def test_weights_of_four_bits_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft, "find_spec", lambda name: None)
    words = ["--dataset", "x", "--model_name_or_path", "y", "--lora_rank", "4", "--load_in_4bit", "true"]
    with pytest.raises(
        SystemExit, match=r"load_in_4bit needs bitsandbytes, which is not installed; pip install 'hf_longctx\[qlora\]'"
    ):
        read_settings(ALL, words)


def test_adapters_over_random_weights_are_refused(config_file: str) -> None:
    with pytest.raises(SystemExit, match="lora_rank saves adapters only, and random weights from model_config would be lost"):
        read_settings(ALL, [config_file, "--lora_rank", "4"])


def test_positions_of_a_checkpoint_are_extended_before_it_is_loaded(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_attention_heads=1, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    words = ["--dataset", "x", "--model_name_or_path", str(tmp_path), "--max_length", "256"]
    loaded = {}
    for scaling in ("yarn", "dynamic", None):
        recipe, settings, _ = read_settings(ALL, [*words, *(["--rope_scaling", scaling] if scaling else [])])
        loaded[scaling] = load_model(recipe, settings)
    assert loaded["yarn"].config.rope_parameters["factor"] == 4 and rope_problems(loaded["yarn"]) == []
    assert loaded["dynamic"].config.rope_parameters["factor"] == 4 and rope_problems(loaded["dynamic"]) == []
    assert loaded["yarn"].config.max_position_embeddings == 256 and loaded[None].config.max_position_embeddings == 64


@pytest.mark.parametrize("name", ["GptOssForCausalLM", "Gemma3ForConditionalGeneration"])
def test_classes_without_sdpa_or_with_towers_are_loaded_and_adapted(tmp_path: Path, name: str) -> None:
    build_any(name).save_pretrained(tmp_path)
    recipe, settings, _ = read_settings(ALL, ["--dataset", "x", "--model_name_or_path", str(tmp_path), "--lora_rank", "2"])
    model = with_adapters(load_model(recipe, settings), recipe)
    adapted = {name.partition(".layers.")[0] for name, weight in model.named_parameters() if weight.requires_grad}
    # not the towers, which rows of text never reach
    assert adapted == {f"base_model.model.model{'' if name == 'GptOssForCausalLM' else '.language_model'}"}


def test_positions_of_random_weights_are_not_extended(config_file: str) -> None:
    with pytest.raises(SystemExit, match="rope_scaling extends a checkpoint; with model_config"):
        read_settings(ALL, [config_file, "--rope_scaling", "yarn"])


def test_file_stands_first(config_file: str) -> None:
    with pytest.raises(SystemExit, match="give the YAML file first"):
        read_settings(ALL, ["--max_length", "7", config_file])


def test_bad_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "twice.yaml").write_text("max_length: 1\nmax_length: 2\n")
    with pytest.raises(SystemExit, match="key 'max_length' occurs twice"):
        read_settings(ALL, [str(tmp_path / "twice.yaml")])
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(SystemExit, match=r"broken\.yaml"):
        read_settings(ALL, [str(tmp_path / "broken.yaml")])
    with pytest.raises(SystemExit, match="does not exist"):
        read_settings(ALL, [str(tmp_path / "none.yaml")])
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    with pytest.raises(SystemExit, match="expected one `key: value` per line, found a list"):
        read_settings(ALL, [str(tmp_path / "list.yaml")])


@pytest.mark.quick
@pytest.mark.parametrize("name", ["demo.yaml", "text.yaml", "single_gpu_long.yaml", "pipeline.yaml", "extend_demo.yaml"])
def test_shipped_configs_are_valid(name: str) -> None:
    path = Path(__file__).parents[2] / "recipes" / "configs" / name
    recipe, config, _ = read_settings(ALL, [str(path)])
    assert recipe.sources and config.max_length


def test_shipped_paths_are_found_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = Path(__file__).parents[2] / "recipes" / "configs"
    monkeypatch.chdir(tmp_path)
    base = read_settings(ALL, [str(configs / "extend_demo.yaml")])[0].model_name_or_path
    template = read_settings(ALL, [str(configs.parent / "tasks" / "chat" / "config.yaml")])[0].chat_template
    assert (Path(base) / "model.safetensors").is_file() and Path(template).is_file()
    # the user's own folder wins
    (tmp_path / "recipes" / "copy_base").mkdir(parents=True)
    assert read_settings(ALL, [str(configs / "extend_demo.yaml")])[0].model_name_or_path == "recipes/copy_base"


@pytest.mark.parametrize("text", ["degrees: all", "degrees: [all]"])
def test_degrees_may_be_the_word_all(tmp_path: Path, text: str) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(FILE.replace("degrees: [1, 2]", text))
    assert read_settings(ALL, [str(path)])[1].degrees == "all"
    assert read_settings(ALL, [str(path), "--degrees", "2", "1"])[1].degrees == [2, 1]


NINE = [f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{i}: {nine}\n" for i, nine in enumerate(NINE, 1))
BAD_FILES = {
    "billion laughs": (LAUGHS, "aliases make more than 100,000 values"),
    "a list in itself": ("degrees: &a [1, *a]\n", "aliases make more than 100,000 values"),
    "deep nesting": ("degrees: " + "[" * 10**5, "is nested too deeply"),
    "an endless integer": ("max_length: " + "9" * 5000, "Exceeds the limit (4300 digits)"),
    "a date that is none": ("max_length: 2020-99-99", "month must be in 1..12"),
    "a list as a key": ("? [1]\n: 2\n", "is not YAML that can be read"),
    "a date in a mapping": ("model_config: {a: 2020-01-01}", "'model_config' holds a value that is no text, number or list"),
    "no text": (b"\xff\xfe\x00\x80", "is not YAML that can be read"),
    "too large": ("#" * 2**21, "has 2,097,152 bytes; a file of settings has at most 1,048,576"),
    "nested JSON": ("dataset: x\nmodel_config: '" + "[" * 10**5 + "'", "model_config is nested too deeply"),
    "two values": ("dataset: x\nmodel_name_or_path: y\nmax_length: [1, 2]", "'2' follows the one value that --max_length takes"),
}


@pytest.mark.wide("deep nesting")
@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_are_no_settings_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    content, message = BAD_FILES[name]
    path = tmp_path / "bad.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def refusal() -> str:
        with pytest.raises(SystemExit) as error:
            read_settings(ALL, [str(path)])
        return str(error.value)

    found, num_calls = counted_calls(refusal)
    assert message in found and "\n" not in found and len(found) < 2000
    assert num_calls < 200_000


def test_aliases_that_repeat_a_few_values_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("dataset: x\nmodel_name_or_path: &name y\ntokenizer: *name\nneedle_lengths: &n [16, 32]\ndegrees: [1, 2]\n")
    recipe, _, _ = read_settings(ALL, [str(path), "--use_cpu", "true"])
    assert recipe.tokenizer == "y" and recipe.needle_lengths == [16, 32]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--text_column", "text"], "split"),
        (["--messages_column", "messages"], "truncate"),
        (["--prompt_column", "a", "--completion_column", "b"], "truncate"),
    ],
)
def test_long_rows_are_cut_as_suits_the_data_unless_the_settings_say_it(config_file: str, words: list[str], expected) -> None:
    recipe, config, _ = read_settings(ALL, [config_file, *words])
    assert config.long_sequences == "error" and with_cuts(config, recipe).long_sequences == expected
    assert "long_sequences" not in given_settings([config_file, *words])
    assert "long_sequences" in given_settings([config_file, "--long_sequences=error"])
    given = given_settings([config_file, "--max_length", "7", "--max_length=8", "--bf16", "--output_dir", "out"])
    assert (given["max_length"], given["use_cpu"], given["bf16"], given["output_dir"]) == ("8", "True", "true", "out")


def test_a_length_beyond_the_models_positions_is_refused_before_data_is_read(config_file: str) -> None:
    def check(model_config: str) -> None:
        words = ["--model_config", model_config, "--max_length", "9000", "--dataset", "nowhere.jsonl"]
        recipe, config, _ = read_settings(ALL, [config_file, *words])
        check_fit(recipe, config, ByT5Tokenizer(extra_ids=0))

    with pytest.raises(SystemExit, match=r"settings: max_length 9000 is above the model's max_position_embeddings 2048"):
        check('{"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4}')
    with pytest.raises(SystemExit, match=r"settings: .*hidden size \(8\) is not a multiple"):
        check('{"model_type": "llama", "hidden_size": 8, "num_attention_heads": 32}')


def with_deepspeed(folder: Path, source: str) -> list[str]:
    path = folder / "deepspeed.yaml"
    path.write_text(f"{FILE}deepspeed: {source}\n")
    return [str(path)]


CLIPPED = '{"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5, "bf16": {"enabled": "auto"}}'


@pytest.mark.parametrize("is_file", [True, False])
def test_a_deepspeed_configuration_becomes_settings(tmp_path: Path, is_file: bool) -> None:
    (tmp_path / "ds.json").write_text(CLIPPED)
    words = with_deepspeed(tmp_path, str(tmp_path / "ds.json") if is_file else CLIPPED)
    _, config, args = read_settings(ALL, words)
    assert (config.parameters, args.max_grad_norm, args.learning_rate, args.deepspeed) == ("sharded", 0.5, 1e-3, None)
    # the command line names another one, or the same value again
    assert read_settings(ALL, [*words, "--deepspeed", "{}"])[1].parameters == "replicated"
    assert read_settings(ALL, [*words, "--parameters", "sharded", "--max_grad_norm", "0.5"])[2].max_grad_norm == 0.5


@pytest.mark.parametrize(
    "words,message",
    [
        (["--max_grad_norm", "1"], "asks for max_grad_norm=0.5, but max_grad_norm is 1.0; give both the same"),
        (["--parameters", "gathered_per_round"], "asks for parameters='sharded', but parameters is 'gathered_per_round'"),
        (["--deepspeed", "nowhere.json"], "nowhere.json does not exist; give the path of a JSON file"),
        (["--deepspeed={"], "is not JSON that can be read"),
        (["--deepspeed"], "does not exist"),
        (["--deepspeed", '{"fp16": {"enabled": true}}'], "fp16 is .*; set bf16.enabled"),
    ],
)
def test_a_deepspeed_configuration_that_cannot_be_obeyed_is_refused(tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        read_settings(ALL, [*with_deepspeed(tmp_path, CLIPPED), *words])


def test_stages_decide_what_stage_2_becomes(tmp_path: Path) -> None:
    words = with_deepspeed(tmp_path, "{zero_optimization: {stage: 2}}")
    assert read_settings(ALL, words)[1].parameters == "gathered_per_round"
    assert read_settings(ALL, [*words, "--stages", "2"])[1].parameters == "gathered_per_step"
