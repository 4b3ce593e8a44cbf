"""GRPO with a vLLM server: plans on ranks follow stock TRL on one process, and the server has their weights after every step."""

from __future__ import annotations

import functools
import importlib.util
import random
import tempfile
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import accelerate
import datasets
import peft
import pytest
import torch
from helpers.models.chats import word_tokenizer
from helpers.models.reference import relative_error
from helpers.models.tiny_models import MOE_FAMILIES, ModelCase, build_model, tiny_llama
from helpers.ranks.rank_pool import RankFailure
from helpers.ranks.rank_steps import whole
from helpers.servers.gloo_transfer import gloo_client
from helpers.servers.stub_colocated import StubLLM, stub_colocated
from helpers.servers.stub_vllm import free_port, stub_server, tabled
from helpers.trainers.stock_runs import quiet_config
from helpers.trainers.trl_runs import reward, rows_of, trl_arguments
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast

from hf_longctx import LongContextMixin
from hf_longctx.hf.checkpoints.weight_source import WeightSource
from hf_longctx.runtime.execution.executor import StepExecutor

pytestmark = [
    pytest.mark.trl,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL (pip install trl==1.16.0)"),
]
# stock norms, and a head of TRL, compute in fp32
TOLERANCE = 2e-6
LORA = (("r", 2), ("lora_alpha", 8), ("target_modules", ["q_proj", "v_proj", "down_proj"]))
# the last is rounding
NOT_COMPARED = {"step_time", "sampling/sampling_logp_difference/max"}


def turns(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Rollouts of several turns, between which an environment wrote, with the sampler's log-probabilities; some have no end."""
    made: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
    first, eos = trainer.accelerator.process_index * len(prompts), trainer.processing_class.eos_token_id
    for place, text in enumerate(prompts, start=first):
        draw = random.Random(f"{text} {place} {trainer.state.global_step}")
        ids, mask = [], []
        for _ in range(draw.randint(1, 3)):
            said, heard = draw.randint(2, 9), draw.randint(0, 6)
            ids += [draw.randint(6, 25) for _ in range(said + heard)]
            mask += [1] * said + [0] * heard
        if place % 3:
            ids, mask = [*ids, eos], [*mask, 1]
        made["prompt_ids"].append(trainer.processing_class(text)["input_ids"])
        made["completion_ids"].append(ids)
        made["env_mask"].append(mask)
        made["logprobs"].append([-4 + 0.3 * draw.gauss(0, 1) for _ in ids])
    return made


def calling(prompt: list[int], place: int) -> list[int]:
    """A call of a tool, twice if the place says so, and an answer; some rows only answer."""
    tokenizer, num_calls = chat_tokenizer(), (sum(prompt) + place) % 3
    said = tokenizer.decode(prompt).count("<tool_response>")
    call = '<tool_call>\n{"name": "shout", "arguments": {"word": "' + "ab" * (1 + said) + '"}}\n</tool_call>'
    text = "" if said >= 2 else call if said < num_calls or not said else f"so {num_calls}"
    return [*tokenizer(text or f"done {place}")["input_ids"], tokenizer.eos_token_id]


def shout(word: str) -> str:
    """Says a word louder.

    Args:
        word: The word.
    """
    return word.upper() + "!"


class Room:
    """An environment that gives the prompt, and counts what was said in it."""

    def reset(self, **_: Any) -> str:
        self.heard = 0
        return " and wait"

    def shout(self, word: str) -> str:
        """Says a word louder.

        Args:
            word: The word.
        """
        self.heard += len(word)
        return word.upper() + "!"

    def get_reward(self) -> float:
        return self.heard / 7


@functools.cache
def chat_tokenizer() -> Any:
    """A tokenizer of bytes with the template of Qwen 3, whose tool calls TRL reads."""
    from trl.chat_template_utils import qwen3_chat_template

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        "<|endoftext|>",
        "<|im_end|>",
        "<|im_start|>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
    ]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special[:3], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["said hello"], trainer)
    tokenizer.add_tokens(special[3:])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    made.chat_template = qwen3_chat_template
    return made


def of_kind(kind: str) -> dict[str, Any]:
    """Arguments of a trainer whose completions come from the server, a rollout function, or turns with tools or environments."""
    if kind in ("server", "turns"):
        more = {"rollout_func": turns} if kind == "turns" else {}
        return {"train_dataset": rows_of("prompt"), "processing_class": word_tokenizer(), "reward_funcs": reward, **more}
    prompts = [[{"role": "user", "content": f"say {'o' * (i % 5)} {i}"}] for i in range(16)]
    more = {"environment_factory": Room} if kind == "environment" else {"tools": [shout], "reward_funcs": reward}
    return {"train_dataset": datasets.Dataset.from_dict({"prompt": prompts}), "processing_class": chat_tokenizer(), **more}


def tiny(case: ModelCase, kind: str) -> Any:
    """The model of a case; for chats, one with as many tokens as their tokenizer."""
    if kind in ("server", "turns"):
        return build_model(replace(case, lora=()))
    torch.manual_seed(case.seed)
    model = tiny_llama(vocab_size=320, max_position_embeddings=4096).double()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15)
    return model


def train(
    url: str, kind: str, case: ModelCase, config: dict[str, Any] | None, arguments: dict[str, Any], name: str = "GRPO"
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], dict[str, int]]:
    """Log, weights, and numbers of forwards and steps under plans, of a training on this rank; stock if `config` is None.

    url: of the server; empty for vLLM in this process.
    """
    import trl

    base: Any = getattr(trl, f"{name}Trainer")
    settings: dict[str, Any] = {} if config is None else {"longctx_config": quiet_config(**config)}
    if case.lora:
        settings["peft_config"] = peft.LoraConfig(task_type="CAUSAL_LM", **dict(case.lora))
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
    if not url:
        server = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
    counts = {"score": 0, "run": 0}

    def counted(method: str) -> Any:
        own = getattr(StepExecutor, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[method] += 1
            return own(*args, **kwargs)

        return patch.object(StepExecutor, method, call)

    vllm: Any = gloo_client() if url else stub_colocated()
    with vllm as colocated, tempfile.TemporaryDirectory() as folder, counted("score"), counted("run"):
        model: Any = tiny(case, kind)
        # TRL makes a reference from a folder
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(f"{folder}/base")
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        save_file(weights, f"{folder}/base/model.safetensors", metadata={"format": "pt"})
        experts = {"experts_implementation": "eager"} if case.family in MOE_FAMILIES else {}
        model = type(model).from_pretrained(f"{folder}/base", dtype=model.dtype, **experts)
        trainer = (base if config is None else type("Planned", (LongContextMixin, base), {}))(
            model=model,
            args=trl_arguments(getattr(trl, f"{name}Config"), folder, **{**server, **arguments}),
            **of_kind(kind),
            **settings,
        )
        if not url:
            StubLLM.watch = staticmethod(lambda: assert_away(trainer))
        trainer.train()
    if not url:
        turn = ["weights", "reload", "kv_cache", "generate", "sleep"]
        assert colocated[0].calls == ["sleep", *turn * trainer.state.max_steps]
    weights = {key: whole(value.detach()).clone() for key, value in trainer.model.named_parameters()}
    return trainer.state.log_history, weights, counts


def assert_away(trainer: Any) -> None:
    """Nothing of a training has memory on its device, but vLLM and tensors in use."""
    states = [value for state in trainer._plain_optimizer.state.values() for value in state.values()]
    for tensor in (*trainer.model.parameters(), *trainer.model.buffers(), *trainer.ref_model.parameters(), *states):
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert not own.untyped_storage().nbytes() or not own.untyped_storage().resizable()
    assert trainer.state.global_step == 0 or states


REPLICATED = {"tokens_per_rank": 60}
SHARDED = {"tokens_per_rank": 60, "parameters": "sharded"}
ACCUMULATED = {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "rows_per_step": 4}
# everything that turns bring: truncated rows, a reference, a correction for the sampler
TURNS = {"max_completion_length": 60, "mask_truncated_completions": True, "beta": 0.1, "max_steps": 3}
# rows are trained with the weights that scored them, then with later ones, at which ratios are clipped
EPOCHS = {**TURNS, "num_iterations": 2, "vllm_importance_sampling_mode": "token_truncate", "epsilon": 0.02, "learning_rate": 2.0}
SEQUENCES = {"importance_sampling_level": "sequence"}
LONG = {"max_completion_length": 400, "max_steps": 1}
# name -> (ranks, kind of completions, model, settings of plans, arguments)
RUNS: dict[str, tuple[int, str, ModelCase, dict[str, Any], dict[str, Any]]] = {
    "whole": (1, "server", ModelCase(), REPLICATED, {}),
    "two ranks": (2, "server", ModelCase(tied=True), REPLICATED, {"temperature": 0.7}),
    "rloo": (2, "server", ModelCase(), SHARDED, {"beta": 0.1}),
    "sharded": (2, "server", ModelCase(), SHARDED, ACCUMULATED),
    "adapters": (2, "server", ModelCase(lora=LORA), SHARDED, {"beta": 0.1}),
    "experts": (2, "server", ModelCase("qwen3_moe"), SHARDED, {"router_aux_loss_coef": 0.0}),
    "uncorrected": (
        2,
        "server",
        ModelCase(),
        SHARDED,
        {**ACCUMULATED, "vllm_importance_sampling_correction": False, "temperature": 0.7},
    ),
    "grpo, turns": (1, "turns", ModelCase(), REPLICATED, {**EPOCHS, "loss_type": "grpo", "delta": 1.05}),
    "gspo, turns": (2, "turns", ModelCase(), SHARDED, {**EPOCHS, **SEQUENCES, "loss_type": "grpo"}),
    "bnpo, turns": (2, "turns", ModelCase(), REPLICATED, {**EPOCHS, "loss_type": "bnpo", "use_bias_correction_kl": True}),
    "dr_grpo, turns": (2, "turns", ModelCase(), SHARDED, {**EPOCHS, "loss_type": "dr_grpo"}),
    "dapo, turns": (2, "turns", ModelCase(lora=LORA), SHARDED, EPOCHS),
    "cispo, turns": (2, "turns", ModelCase(), SHARDED, {**EPOCHS, "loss_type": "cispo"}),
    "sapo, turns": (2, "turns", ModelCase(), SHARDED, {**EPOCHS, "loss_type": "sapo"}),
    "vespo, turns": (
        2,
        "turns",
        ModelCase(),
        SHARDED,
        {**TURNS, "loss_type": "vespo", "vllm_importance_sampling_mode": "token_mask"},
    ),
    "luspo, turns": (2, "turns", ModelCase(), SHARDED, {**TURNS, **SEQUENCES, "loss_type": "luspo"}),
    "tools": (1, "tools", ModelCase(), {"tokens_per_rank": 1200, "max_length": 4096}, LONG),
    "tools, two ranks": (2, "tools", ModelCase(), {**SHARDED, "tokens_per_rank": 1200, "max_length": 4096}, LONG),
    "environment": (1, "environment", ModelCase(), {"tokens_per_rank": 1200, "max_length": 4096}, LONG),
}


# name -> forwards and steps under plans; old log-probabilities are scored once for each generation, and references apart
COUNTS = {
    "whole": {"score": 4, "run": 4},
    "sharded": {"score": 4, "run": 8},
    # nothing is scored for a loss against the model itself
    "uncorrected": {"score": 0, "run": 8},
    # two steps for each generation, and one reference: the second has other weights, and is trained in one pass
    **{f"{kind}, turns": {"score": 2 + 2, "run": 3} for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")},
    # ratios of sequences, whose slopes are known only after all tokens were scored
    "gspo, turns": {"score": 2 + 2 + 1, "run": 3},
    # adapters are switched off for the reference
    "adapters": {"score": 4 + 4, "run": 4},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_training_with_a_server_follows_stock_trl(ranks, name: str) -> None:
    num_ranks, kind, case, config, arguments = RUNS[name]
    trainer = "RLOO" if name == "rloo" else "GRPO"
    write = tabled if kind in ("server", "turns") else calling
    # TRL's loop over calls of tools ends on each rank when its own rows have none, and then its ranks generate apart
    stock_ranks = 1 if kind == "tools" else num_ranks
    logs, weights, servers = [], [], []
    for num, settings in ((stock_ranks, None), (num_ranks, config)):
        with stub_server(tiny(replace(case, seed=9), kind), write=write) as server:
            made = {**arguments, "vllm_group_port": free_port()}
            results = ranks(num).run(train, server.url, kind, case, settings, made, trainer)
        servers.append(server)
        logs.append(results[0][0])
        weights.append([each[1] for each in results])
    assert results[0][2] == COUNTS.get(name, results[0][2])
    (stock_log, log), ((stock, *_), found) = logs, weights
    for each in found:
        assert max(relative_error(each[key], stock[key]) for key in stock) <= TOLERANCE
    # means over the rows of ranks
    of_ranks = {"entropy", *(key for key in log[0] if "mean" in key)} if stock_ranks < num_ranks else set()
    for key in stock_log[0].keys() - NOT_COMPARED - of_ranks:
        expected = [each[key] for each in stock_log[:-1] if key in each]
        assert [each[key] for each in log[:-1] if key in each] == pytest.approx(expected, rel=1e-5, abs=1e-6), key
    if "num_iterations" in arguments:
        assert not any("clip_ratio/region_mean" in each for each in log) or log[1]["clip_ratio/region_mean"] > 0
    assert len(servers[1].updates) == len(servers[0].updates) > 0
    assert {*servers[1].updates[0]} == {*servers[0].updates[0]} or case.family in MOE_FAMILIES
    # TRL logs it only with its correction
    if kind != "turns" and trainer == "GRPO" and arguments.get("vllm_importance_sampling_correction", True):
        # the server began with other weights, and computes what the trainer does with those that it got before each generation
        assert max(each["sampling/sampling_logp_difference/max"] for each in log[:-1]) < 1e-6


def test_a_loss_of_ones_own_is_trained_in_two_passes() -> None:
    import trl

    class Squared(trl.GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
            return (1 + super()._compute_loss(model, inputs)).square()

    found = []
    for config in (None, REPLICATED):
        with stub_server(build_model(ModelCase(seed=9))) as server, patch.object(trl, "GRPOTrainer", Squared):
            found.append(train(server.url, "turns", ModelCase(), config, {**EPOCHS, "vllm_group_port": free_port()}))
    (stock_log, stock, _), (log, weights, counts) = found
    assert counts == {"score": 2 + 2 + 1, "run": 3}
    assert [each["loss"] for each in log[:-1]] == pytest.approx([each["loss"] for each in stock_log[:-1]], rel=1e-5)
    assert max(relative_error(weights[key], stock[key]) for key in stock) <= TOLERANCE


def test_slopes_other_than_those_that_were_trained_end_the_step() -> None:
    def doubled(accelerator: Any, loss: torch.Tensor, **_: Any) -> None:
        (2 * loss).backward()

    message = r"(?s)is not the one that plans have trained in one pass.* tokens have other slopes"
    with (
        stub_server(build_model(ModelCase())) as server,
        patch.object(accelerate.Accelerator, "backward", doubled),
        pytest.raises(ValueError, match=message),
    ):
        train(server.url, "turns", ModelCase(), REPLICATED, {**EPOCHS, "vllm_group_port": free_port()})


@pytest.mark.parametrize("config", [REPLICATED, SHARDED], ids=["replicated", "sharded"])
def test_a_colocated_vllm_has_the_device_and_the_weights_of_the_last_step(ranks, config: dict[str, Any]) -> None:
    case = ModelCase()
    # states of an optimizer, and a reference
    arguments = {"optim": "adamw_torch", "adam_epsilon": 0.01, "learning_rate": 0.02, "beta": 0.1, "max_steps": 3}
    with stub_server(tiny(case, "server")) as server:
        port = {"vllm_group_port": free_port()}
        ((stock_log, stock, _),) = ranks(1).run(train, server.url, "server", case, None, {**arguments, **port})
    for log, weights, _ in ranks(2).run(train, "", "server", case, config, arguments):
        assert max(relative_error(weights[key], stock[key]) for key in stock) <= TOLERANCE
        for key in ("loss", "grad_norm", "reward", "kl"):
            assert [each[key] for each in log[:-1]] == pytest.approx([each[key] for each in stock_log[:-1]], rel=1e-5, abs=1e-6)
        assert max(each["sampling/sampling_logp_difference/max"] for each in log[:-1]) < 1e-6


FAULTS = {
    "start_weight_update": "/start_weight_update answered 500",
    "update_weights": "/update_weights answered 500",
    "hang": "did not take the weights (",
    "finish_weight_update": "/finish_weight_update answered 500",
    "reset_prefix_cache": "/reset_prefix_cache answered 500",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_is_named_on_every_rank_within_the_limit(ranks, fault: str) -> None:
    arguments = {"max_steps": 1, "vllm_server_timeout": 3.0, "vllm_group_port": free_port()}
    with stub_server(build_model(ModelCase()), fault=fault) as server:
        begun_s = time.monotonic()
        with pytest.raises(RankFailure) as raised:
            ranks(2).run(train, server.url, "server", ModelCase(), SHARDED, arguments)
        assert time.monotonic() - begun_s < 150
    for rank in (0, 1):
        own = str(raised.value).split(f"rank {rank}: Traceback")[1]
        assert "the weights could not be sent" in own and f"the vLLM server at {server.url} did not take the weights" in own
        assert FAULTS[fault] in own and "raise vllm_server_timeout (3 s)" in own
    # a repeated request would be answered by the rest of the weights
    assert server.requests.count(fault if fault != "hang" else "update_weights") == 1


def test_the_generator_of_a_rank_that_fails_raises_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: WeightSource) -> Any:
        yield "model.norm.weight", torch.ones(8)
        raise FloatingPointError("no memory for a whole weight")

    with stub_server(build_model(ModelCase())) as server:
        monkeypatch.setattr(WeightSource, "__iter__", broken)
        arguments = {"max_steps": 1, "vllm_group_port": free_port()}
        with pytest.raises(FloatingPointError, match="no memory for a whole weight"):
            train(server.url, "server", ModelCase(), REPLICATED, arguments)
