"""verl's losses through our engine on two ranks: values, norms and weights of verl's own FSDP2 engine on one process."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.models.reference import relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.ranks.rank_pool import RankFailure
from helpers.ranks.rank_steps import whole
from helpers.trainers.stock_runs import OFF

pytestmark = [pytest.mark.verl, pytest.mark.timeout(900)]
pytest.importorskip("verl")

# seconds for the ranks, since an import of verl takes many
LONG_S = 400.0
PROMPT = 6
# lengths of the rows of two ranks, in two mini-batches
BATCHES = [[[31, 9, 12], [14, 22, 8]], [[9, 40, 17], [11, 12, 13]]]
# cases: model, aggregation, and the loss of the policy
LOSSES = {
    "ppo": ("language_model", "token-mean", "vanilla"),
    "gspo": ("language_model", "seq-mean-token-mean", "gspo"),
    "value": ("value_model", "token-mean", ""),
}


def batch_of(lengths: list[int], seed: int, num_rows: int) -> Any:
    """Rows as verl's trainer sends them to an engine."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    draw = torch.Generator().manual_seed(seed)
    ids = [torch.randint(2, 60, (n,), generator=draw) for n in lengths]
    answers = [row[PROMPT:] for row in ids]

    def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def drawn(scale: float, shift: float) -> torch.Tensor:
        return jagged([(torch.randn(len(each), generator=draw) * scale + shift).double() for each in answers])

    # a tool wrote every fifth token
    masks = [torch.arange(len(each)) % 5 != 4 for each in answers]
    data = TensorDict(
        {
            "input_ids": jagged(ids),
            "position_ids": jagged([torch.arange(len(row)) for row in ids]),
            "prompts": jagged([row[:PROMPT] for row in ids]),
            "responses": jagged(answers),
            "loss_mask": jagged([torch.cat([torch.zeros(PROMPT), each]).long() for each in masks]),
            "response_mask": jagged([each.long() for each in masks]),
            "old_log_probs": drawn(0.1, -4.1),
            "advantages": drawn(1.0, 0.2),
            "values": drawn(0.3, 0.0),
            "returns": drawn(0.5, 0.3),
        },
        batch_size=[len(ids)],
    )
    tu.assign_non_tensor(
        data,
        global_batch_size=num_rows,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=1,
        use_remove_padding=False,
        temperature=0.8,
    )
    return data


def configs(strategy: str, folder: str, kind: str, longctx: dict[str, Any], lora_rank: int) -> tuple[dict[str, Any], Any]:
    """Arguments of an engine, and the loss function, from verl's own configuration classes."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPActorConfig, FSDPCriticConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.utils.losses import ppo_loss, value_loss

    from hf_longctx.integrations.verl import LongContextActorConfig, LongContextCriticConfig, LongContextEngineConfig

    model_type, aggregation, loss_mode = LOSSES[kind]
    model = HFModelConfig(
        path=f"{folder}/{model_type}",
        load_tokenizer=False,
        override_config={"attn_implementation": "sdpa"},
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        lora_rank=lora_rank,
        lora={"merge": True} if lora_rank else {},
        lora_adapter_path=f"{folder}/adapter" if lora_rank else None,
    )
    model.model_type = model_type
    is_ours = strategy == "hf_longctx"
    shared: dict[str, Any] = {"strategy": strategy, "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    shared |= {"ppo_mini_batch_size": 6, "loss_agg_mode": aggregation}
    if is_ours:
        engine = LongContextEngineConfig(longctx=longctx, dtype="float32", output_dir=f"{folder}/out", param_offload=True)
        role = (LongContextCriticConfig if kind == "value" else LongContextActorConfig)(hf_longctx=engine, **shared)
    else:
        whole_precision = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
        engine = FSDPEngineConfig(strategy=strategy, mixed_precision=whole_precision, use_torch_compile=False)
        role = FSDPCriticConfig(fsdp=engine, **shared) if kind == "value" else FSDPActorConfig(fsdp_config=engine, **shared)
    if kind == "gspo":
        object.__setattr__(role.policy_loss, "loss_mode", loss_mode)
    optimizer = FSDPOptimizerConfig(lr=5e-3, total_training_steps=4, clip_grad=0.5, lr_scheduler_type="cosine", min_lr_ratio=0.1)
    given = {"model_config": model, "engine_config": role.engine, "optimizer_config": optimizer}
    return {**given, "checkpoint_config": CheckpointConfig()}, partial(value_loss if kind == "value" else ppo_loss, config=role)


def value_model(local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(local_path, dtype=torch_dtype, config=model_config)


def made(
    strategy: str,
    folder: str,
    kind: str,
    longctx: dict[str, Any] | None = None,
    lora_rank: int = 0,
    is_reference: bool = False,
) -> tuple[Any, Any]:
    """An initialised engine and its loss function."""
    from helpers.models.verl_platform import use_cpu

    use_cpu()
    os.environ["VERL_ENGINE_DEVICE"] = "cpu" if strategy == "hf_longctx" else "cuda"
    import verl.utils.model
    import verl.workers.engine
    from verl.workers.engine.base import EngineRegistry

    import hf_longctx.integrations.verl  # noqa: F401

    # verl's own asks for FlashAttention
    verl.utils.model.load_valuehead_model = value_model
    given, loss = configs(strategy, folder, kind, longctx or {}, lora_rank)
    given["engine_config"].forward_only = is_reference
    engine = EngineRegistry.new(LOSSES[kind][0], strategy, **given)
    engine.initialize()
    return engine, loss


def trained(strategy: str, folder: str, kind: str, longctx: dict[str, Any] | None = None, lora_rank: int = 0) -> Any:
    """Values before training, then loss, norm and rate of each mini-batch, and weights at the end."""
    engine, loss_fn = made(strategy, folder, kind, longctx, lora_rank)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    scores, steps = [], []
    for number, of_ranks in enumerate(BATCHES):
        mine = [of_ranks[rank]] if num_ranks == 2 else of_ranks
        # one process has the rows of both ranks
        batches = [batch_of(of_ranks[each], 10 * number + each, 6) for each in ([rank] if num_ranks == 2 else range(2))]
        data = batches[0] if len(batches) == 1 else joined(batches)
        assert len(data) == sum(map(len, mine))
        with engine.eval_mode(), engine.disable_adapter() if lora_rank and number else nullcontext():
            # without the adapter before the second mini-batch
            found = engine.infer_batch(data.clone())["model_output"]
        name = "values" if kind == "value" else "log_probs"
        scores += [row[PROMPT - 1 : -1].detach().clone() for row in found[name].unbind()]
        with engine.train_mode():
            result = engine.train_batch(data, loss_fn)
            rate = engine.lr_scheduler_step()
        loss = torch.tensor(sum(result["loss"]), dtype=torch.float64)
        dist.all_reduce(loss)
        steps.append((float(loss) / num_ranks, result["metrics"]["grad_norm"], rate))
        if strategy == "hf_longctx" and not number:
            # goes on in another engine
            engine.save_checkpoint(f"{folder}/saved", global_step=1)
            engine._engine().close()
            engine, _ = made(strategy, folder, kind, longctx, lora_rank)
            engine.load_checkpoint(f"{folder}/saved")
    sent = dict(engine.get_per_tensor_param()[0]) if strategy == "hf_longctx" else {}
    weights = {name: whole(weight.detach()).clone() for name, weight in engine.module.named_parameters()}
    if strategy == "hf_longctx":
        engine.to("cpu")
        engine._engine().close()
    return scores, steps, weights, sorted(sent)


def joined(batches: list[Any]) -> Any:
    from verl.utils import tensordict_utils as tu

    names = [name for name in list(batches[0].keys()) if isinstance(batches[0][name], torch.Tensor)]
    data = tu.concat_tensordict([each.select(*names) for each in batches])
    tu.assign_non_tensor(data, global_batch_size=6, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
    tu.assign_non_tensor(data, use_remove_padding=False, temperature=0.8)
    return data


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Folder with a policy and a value model of the same size."""
    build_model(ModelCase()).float().save_pretrained(tmp_path / "language_model")
    head = (("num_labels", 1), ("classifier_dropout", 0.0))
    build_model(ModelCase(head=head)).float().save_pretrained(tmp_path / "value_model")
    adapted = build_model(ModelCase(lora=(("r", 2), ("target_modules", ["q_proj", "down_proj"]))))
    adapted.float().save_pretrained(tmp_path / "adapter")
    return str(tmp_path)


@pytest.mark.parametrize(
    "kind,parameters,lora_rank",
    [("ppo", "sharded", 0), ("gspo", "sharded", 0), ("value", "sharded", 0), ("ppo", "replicated", 2)],
    ids=["ppo", "gspo", "value", "adapter"],
)
def test_losses_of_verl_train_as_in_its_own_engine(ranks, folder: str, kind: str, parameters: str, lora_rank: int) -> None:
    longctx = {"tokens_per_rank": 40, "max_length": 64, "parameters": parameters}
    if not lora_rank:
        longctx["degrees"] = [1, 2]
    ((expected_scores, expected_steps, expected, _),) = ranks(1).run(
        trained, "fsdp2", folder, kind, None, lora_rank, timeout_s=LONG_S
    )
    results = ranks(2).run(trained, "hf_longctx", folder, kind, longctx, lora_rank, timeout_s=LONG_S)
    places = iter(expected_scores)
    for number in range(len(BATCHES)):
        for scores, *_ in results:
            for row in scores[3 * number : 3 * number + 3]:
                torch.testing.assert_close(row, next(places), rtol=1e-4, atol=1e-5)
    for _, steps, weights, sent in results:
        for found, wanted in zip(steps, expected_steps, strict=True):
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        assert max(relative_error(weights[name], expected[name]) for name in expected) < 1e-5
        assert sent


def composed(*overrides: str) -> Any:
    """verl's configuration with our Hydra files, as its worker makes it."""
    from helpers.models.verl_platform import use_cpu
    from hydra import compose, initialize_config_module

    use_cpu()
    given = ["hydra.searchpath=[pkg://hf_longctx.integrations.verl_config]", "model_engine=hf_longctx"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*given, *overrides])


def test_hydra_files_make_settings_of_all_roles(folder: str) -> None:
    from omegaconf import open_dict
    from verl.utils.config import omega_conf_to_dataclass

    found = composed(
        "+actor_rollout_ref.actor.hf_longctx.longctx.max_length=131072",
        "+actor_rollout_ref.actor.hf_longctx.longctx.degrees=[1,2]",
        "actor_rollout_ref.actor.hf_longctx.param_offload=True",
        f"critic.model.path={folder}/value_model",
        "+critic.model.load_tokenizer=False",
    )
    roles = found.actor_rollout_ref
    with open_dict(roles.ref):
        # verl's worker does so
        for name in [name for name in roles.ref if name.startswith("log_prob_")]:
            roles.ref.pop(name)
        roles.ref.use_dynamic_bsz = True
    actor, ref, critic = map(omega_conf_to_dataclass, (roles.actor, roles.ref, found.critic))
    assert [each.strategy for each in (actor, ref, critic)] == ["hf_longctx"] * 3
    assert actor.engine.param_offload and not actor.engine.forward_only and ref.engine.forward_only
    wanted = {"parameters": "sharded", "max_length": 131072, "degrees": [1, 2]}
    assert dict(actor.engine.longctx) == dict(ref.engine.longctx) == wanted
    assert critic.engine.longctx["parameters"] == "sharded" and (actor.optim.lr, critic.optim.lr) == (1e-6, 1e-5)


REFUSED = {
    "actor_rollout_ref.actor.entropy_coeff=0.01": "entropy_coeff is 0.01",
    "actor_rollout_ref.actor.hf_longctx.dtype=int8": "dtype is 'int8'; give one of bfloat16",
    "actor_rollout_ref.actor.calculate_sum_pi_squared=True": "calculate_sum_pi_squared is True",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_settings_that_plans_do_not_train_are_refused(setting: str) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    with pytest.raises(Exception, match=REFUSED[setting]):
        omega_conf_to_dataclass(composed(setting).actor_rollout_ref.actor)


def misuse(kind: str, folder: str) -> None:
    """Trains entropies, or rows that plans cannot run, on the second rank."""
    from verl.utils import tensordict_utils as tu

    longctx = {**OFF, "tokens_per_rank": 40, "max_length": 64, "parameters": "sharded"}
    engine, loss_fn = made("hf_longctx", folder, "ppo", longctx)
    data = batch_of(BATCHES[0][0], 0, 6)

    def bonus(model_output: dict[str, Any], data: Any, dp_group: Any = None) -> Any:
        loss, metrics = loss_fn(model_output=model_output, data=data)
        return loss - model_output["entropy"].values().sum() * dist.get_rank(), metrics

    if kind == "entropy":
        tu.assign_non_tensor(data, calculate_entropy=True)
    if dist.get_rank():
        if kind == "positions":
            data["position_ids"] = torch.nested.nested_tensor_from_jagged(
                data["position_ids"].values() + 1, data["input_ids"].offsets()
            )
        if kind == "temperature":
            tu.assign_non_tensor(data, temperature=0.5)
        if kind == "top-k":
            tu.assign_non_tensor(data, distillation_use_topk=True)
    try:
        with engine.train_mode():
            engine.train_batch(data, bonus if kind == "entropy" else loss_fn)
    finally:
        engine._engine().close()


MISUSES = {
    "entropy": "the loss trains entropies",
    "positions": "position_ids do not count the tokens of each row from 0",
    "temperature": "temperature 0.5 (rank 1)",
    "top-k": "distillation_use_topk is asked for",
}


@pytest.mark.parametrize("kind", MISUSES)
def test_what_plans_would_not_train_is_an_error_on_every_rank(ranks, folder: str, kind: str) -> None:
    with pytest.raises(RankFailure) as raised:
        ranks(2).run(misuse, kind, folder, timeout_s=LONG_S)
    assert str(raised.value).count(MISUSES[kind]) >= 2, raised.value


def beside_each_other(folder: str) -> tuple[float, float]:
    """Largest differences between a policy and its reference in one worker, before and after a step."""
    longctx = {**OFF, "tokens_per_rank": 40, "max_length": 64, "parameters": "sharded"}
    policy, loss_fn = made("hf_longctx", folder, "ppo", longctx)
    reference, _ = made("hf_longctx", folder, "ppo", longctx, is_reference=True)
    data, found = batch_of(BATCHES[0][dist.get_rank()], dist.get_rank(), 6), []
    for is_trained in (False, True):
        if is_trained:
            with policy.train_mode():
                policy.train_batch(data, loss_fn)
        values = []
        for engine in (policy, reference):
            with engine.eval_mode():
                values.append(engine.infer_batch(data.clone())["model_output"]["log_probs"].values())
        found.append(float((values[0] - values[1]).abs().max()))
    reference._engine().close()
    policy._engine().close()
    return found[0], found[1]


def test_a_policy_and_its_reference_share_a_worker(ranks, folder: str) -> None:
    for before, after in ranks(2).run(beside_each_other, folder, timeout_s=LONG_S):
        assert before == 0 and after > 1e-3
