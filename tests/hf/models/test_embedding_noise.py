"""NEFTune's noise falls on the same tokens in any plan: trained weights are those of single documents with the same noise."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.measures.allocations import measure
from helpers.models.dropout_truth import philox_words
from helpers.models.reference import TOLERANCE, random_rows, relative_error
from helpers.models.tiny_models import ModelCase, build_model
from helpers.models.versions import resuming
from helpers.ranks.rank_steps import whole
from helpers.trainers.trainer_runs import PLAIN_DESCENT, make_trainer

from hf_longctx.hf.models.dropout import key_noise
from hf_longctx.runtime.core import dropout as keys

CASE, ROWS, ALPHA = ModelCase(promoted=True), random_rows([61, 13, 40, 5], seed=5), 5.0
PLANS: dict[str, tuple[dict[str, Any], int]] = {
    "packs": ({"tokens_per_rank": 128, "self_test": True}, 1),
    "slices": ({"tokens_per_rank": 64, "tile_tokens": 8, "device_gib": 1e-3}, 1),
    "groups": ({"tokens_per_rank": 32, "solver": "static", "static_degree": 2}, 2),
    "stages": ({"tokens_per_rank": 96, "stages": 2}, 2),
}


def noise_of(document: int, num_tokens: int, num_channels: int, step: int, seed: int = 3) -> torch.Tensor:
    """Noise on the embeddings of a document, [tokens, channels], without the package's code."""
    key = int.from_bytes(hashlib.blake2b(f"{seed} model.embed_tokens noise".encode(), digest_size=8).digest(), "little")
    counter = np.zeros((num_tokens, num_channels // 4, 4), np.uint64)
    counter[..., 0], counter[..., 1] = np.arange(num_channels // 4), np.arange(num_tokens)[:, None]
    counter[..., 2], counter[..., 3] = document, step
    words = philox_words(counter, (key % 2**32, key >> 32)).reshape(num_tokens, num_channels)
    return torch.from_numpy((2 * (words + 0.5) / 2**32 - 1) * ALPHA / np.sqrt(num_tokens * num_channels))


def plain_weights(num_steps: int) -> dict[str, torch.Tensor]:
    model = build_model(CASE)
    count = sum(label != -100 for row in ROWS for label in row["labels"][1:])
    for step in range(num_steps):
        for number, row in enumerate(ROWS):
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"][1:])
            noise = noise_of(number, ids.shape[1], model.config.hidden_size, step)
            # the bound of transformers
            assert float(noise.abs().max()) <= ALPHA / (ids.shape[1] * model.config.hidden_size) ** 0.5
            logits = model(inputs_embeds=model.get_input_embeddings()(ids) + noise, use_cache=False).logits[0, :-1]
            (F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / count).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    return {name: p.detach() for name, p in model.named_parameters()}


def resume(config: dict[str, Any], num_ranks: int, folder: str, start: str) -> dict[str, torch.Tensor]:
    """Weights of this rank after step 4, of a training that saves at step 2, or goes on from `start`."""
    arguments = {**PLAIN_DESCENT, "max_steps": 4, "per_device_train_batch_size": 4 // num_ranks, "learning_rate": 0.01}
    arguments |= {
        "neftune_noise_alpha": ALPHA,
        "train_sampling_strategy": "sequential",
        "save_strategy": "steps",
        "save_steps": 2,
    }
    trainer = make_trainer(CASE, ROWS, folder, config, arguments)
    trainer.train(resume_from_checkpoint=start or None)
    return {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters()}


def train(config: dict[str, Any], num_ranks: int) -> tuple[dict[str, torch.Tensor], float, float]:
    """Trained weights of this rank, and the loss of an evaluation before training and without noise at all."""
    arguments = {**PLAIN_DESCENT, "max_steps": 2, "per_device_train_batch_size": 4 // num_ranks, "learning_rate": 0.01}
    arguments |= {"neftune_noise_alpha": ALPHA, "train_sampling_strategy": "sequential"}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(CASE, ROWS, folder, config, arguments, eval_dataset=ROWS)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        # the embedding adds noise under plans alone
        embedding = trainer.model.get_input_embeddings()
        if hasattr(embedding, "weight"):
            ids = torch.tensor([[1, 2, 3]])
            assert torch.equal(embedding.train()(ids), embedding.eval()(ids))
    return {name: whole(p.detach()).clone() for name, p in trainer.model.named_parameters()}, before


@pytest.mark.daily("slices")
@pytest.mark.parametrize("plan", PLANS)
def test_any_plan_draws_the_same_noise(ranks, plan: str) -> None:
    config, num_ranks = PLANS[plan]
    expected = plain_weights(2)
    found = ranks(num_ranks).run(train, config, num_ranks) if num_ranks > 1 else [train(config, num_ranks)]
    for weights, loss in found:
        errors = {name: relative_error(weight, expected[name]) for name, weight in weights.items()}
        assert max(errors.values()) <= TOLERANCE, errors
        assert loss == found[0][1]
    assert set().union(*(weights for weights, _ in found)) == set(expected)


@pytest.mark.wide
@resuming
@pytest.mark.parametrize("first,then", [("groups", "slices"), ("stages", "groups")])
def test_a_resumed_training_draws_the_noise_of_the_steps_that_are_left(ranks, tmp_path: Path, first: str, then: str) -> None:
    expected = plain_weights(4)
    for plan, folder, start in ((first, "first", ""), (then, "second", str(tmp_path / "first" / "checkpoint-2"))):
        config, num_ranks = PLANS[plan]
        for weights in ranks(num_ranks).run(resume, config, num_ranks, str(tmp_path / folder), start):
            errors = {name: relative_error(weight, expected[name]) for name, weight in weights.items()}
            assert max(errors.values()) <= TOLERANCE, (plan, errors)


def test_noise_that_is_set_on_a_started_trainer_is_refused(tmp_path) -> None:
    trainer = make_trainer(CASE, ROWS, str(tmp_path), arguments={"max_steps": 1})
    trainer.neftune_noise_alpha = ALPHA
    with pytest.raises(ValueError, match=r"neftune_noise_alpha was set to 5.0, but its plans were started with None"):
        trainer.train()


def test_noise_is_drawn_in_blocks_that_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, num_tokens = torch.nn.Sequential(torch.nn.Embedding(8, 256, dtype=torch.bfloat16)), 8192
    model.get_input_embeddings = lambda: model[0]
    key_noise(model, ALPHA)
    ids = torch.zeros(1, num_tokens, dtype=torch.int64)
    tokens = vars(model[0])[keys.SITE].keys.of_pieces([(num_tokens, 0)], torch.arange(num_tokens).unsqueeze(0))

    def noisy() -> torch.Tensor:
        with tokens.running():
            return model(ids)

    peak, _, found = measure(noisy)
    # embeddings and noise, and the words of a block
    assert peak <= 2 * found.nbytes + 64 * keys._VALUES_ON_CPU < 28 * found.numel()
    monkeypatch.setattr(keys, "_VALUES_ON_CPU", 2**30)
    assert torch.equal(noisy(), found)


def test_noise_is_large_enough_to_be_seen() -> None:
    # the test above would not notice missing noise if it changed nothing
    model, row = build_model(CASE), ROWS[1]
    ids = torch.tensor([row["input_ids"]])
    embedded = model.get_input_embeddings()(ids)
    noisy = model(inputs_embeds=embedded + noise_of(1, ids.shape[1], embedded.shape[-1], 0)).logits
    assert relative_error(noisy, model(inputs_embeds=embedded).logits) > 1e-2
