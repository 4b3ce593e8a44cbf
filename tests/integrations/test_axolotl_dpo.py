"""The plugin's DPO loss has the value, the gradient and the metrics of the one that axolotl's trainer makes from whole logits."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_longctx.hf.log_probs.documents import FUSED
from hf_longctx.hf.log_probs.two_passes import TokenValues
from hf_longctx.hf.rules.axolotl import DPO_LOSSES

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.wide,
    pytest.mark.skipif(importlib.util.find_spec("axolotl") is None, reason="needs axolotl (docs/guides/axolotl.md)"),
]

# name -> attributes of the trainer
SETTINGS: dict[str, dict[str, Any]] = {
    **{kind: {"loss_types": [kind], "loss_weights": [1.0]} for kind in DPO_LOSSES},
    "several": {"loss_types": ["sigmoid", "ipo"], "loss_weights": [0.7, 0.2]},
    "weighting": {"use_weighting": True},
    "balance": {"aux_loss_enabled": True},
}
LENGTHS = [(2, 7), (4, 5), (1, 6), (3, 9), (2, 3), (4, 8)]


class Logits(nn.Module):
    """A model whose logits [B, S, V] are its weights."""

    is_gradient_checkpointing = False

    def __init__(self, seed: int) -> None:
        super().__init__()
        made = torch.randn(len(LENGTHS), 12, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        self.logits_BSV = nn.Parameter(made)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        balance = self.logits_BSV.square().mean() if kwargs.get("output_router_logits") else None
        if not kwargs.get(FUSED):
            return SimpleNamespace(logits=self.logits_BSV, aux_loss=balance)
        assert labels is not None
        next_BS = labels[:, 1:]
        mask_BS = next_BS != -100
        log_BSV = self.logits_BSV[:, :-1].log_softmax(-1)
        own_BS = log_BSV.gather(-1, next_BS.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        parts = (
            own_BS,
            -(log_BSV.exp() * log_BSV).sum(-1),
            log_BSV.argmax(-1) == next_BS,
            self.logits_BSV[:, :-1].mean(-1),
            (2 * log_BSV).logsumexp(-1),
        )
        return TokenValues(*(part.where(mask_BS, torch.zeros_like(part)) for part in parts), mask_BS, balance)


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 11, (len(LENGTHS), 12), generator=torch.Generator().manual_seed(5))
    places = torch.arange(12).expand_as(ids)
    prompts, ends = torch.tensor(LENGTHS).T.unsqueeze(-1)
    kept = (places < ends).long()
    return {"input_ids": ids, "attention_mask": kept, "completion_mask": kept * (places >= prompts)}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_loss_is_that_of_whole_logits(name: str) -> None:
    from axolotl.core.trainers.dpo.trainer import AxolotlDPOTrainer

    from hf_longctx.integrations.axolotl import DPOOfLogProbs

    def outcome(cls: type) -> tuple[float, Tensor, dict[str, float]]:
        trainer, model = object.__new__(cls), Logits(0)
        same = SimpleNamespace(device=torch.device("cpu"), unwrap_model=lambda x: x, reduce=lambda x, how: x)
        same.gather = same.gather_for_metrics = lambda x: x
        vars(trainer).update(model=model, ref_model=Logits(1), accelerator=same, beta=0.3, label_smoothing=0.2, ld_alpha=None)
        vars(trainer).update(loss_types=["sigmoid"], loss_weights=[1.0], use_weighting=False, f_divergence_type="reverse_kl")
        vars(trainer).update(aux_loss_enabled=False, router_aux_loss_coef=0.01, precompute_ref_logps=False, _total_train_tokens=0)
        vars(trainer).update(args=SimpleNamespace(gradient_checkpointing_kwargs=None), _metrics={"train": defaultdict(list)})
        vars(trainer).update(SETTINGS[name])
        loss = trainer._compute_loss(model, batch(), False)
        loss.backward()
        assert model.logits_BSV.grad is not None
        return float(loss), model.logits_BSV.grad, {key: values[-1] for key, values in trainer._metrics["train"].items()}

    (loss, slopes, metrics), (wanted, wanted_slopes, wanted_metrics) = outcome(DPOOfLogProbs), outcome(AxolotlDPOTrainer)
    assert loss == pytest.approx(wanted, rel=1e-12)
    torch.testing.assert_close(slopes, wanted_slopes, rtol=0, atol=1e-12)
    # TRL counts in single precision
    assert metrics == pytest.approx(wanted_metrics, rel=1e-6)
