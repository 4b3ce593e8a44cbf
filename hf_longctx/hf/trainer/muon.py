"""`MuonWithAdamW`: the optimizer Muon for `Trainer`, which has no name for it."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_longctx.hf.models.adapters import base_of
from hf_longctx.hf.models.heads import head_of
from hf_longctx.runtime.parameters.muon import MuonAdamW


class MuonWithAdamW:
    """Muon for the matrices of layers, AdamW for embedding, head, experts, norms and biases; for any `Trainer`.

    Example:

        settings = {"lr": 2e-3, "weight_decay": 0.1, "adamw": {"lr": 5e-5}}
        trainer = LongContextTrainer(..., optimizer_cls_and_kwargs=(MuonWithAdamW, settings))
    """

    def __call__(self, model: nn.Module, adamw: dict[str, Any] | None = None, **muon: Any) -> MuonAdamW:
        """Makes the optimizer of the trained weights of `model`.

        muon: settings of `torch.optim.Muon`. adamw: settings of `torch.optim.AdamW`; norms and biases have no weight decay.
        """
        base: Any = base_of(model)
        ends = [end for end in (base.get_input_embeddings(), head_of(base)) if isinstance(end, nn.Module)]
        outside = {id(weight) for end in ends for weight in end.parameters()}
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        matrices = [weight for weight in trained if weight.dim() == 2 and id(weight) not in outside]
        known = {id(weight) for weight in matrices}
        rest = [weight for weight in trained if id(weight) not in known]
        settings = adamw or {}
        groups: list[dict[str, Any]] = [
            {**settings, "params": [weight for weight in rest if weight.dim() > 1]},
            {**settings, "params": [weight for weight in rest if weight.dim() <= 1], "weight_decay": 0.0},
        ]
        return MuonAdamW(matrices, groups, muon)
