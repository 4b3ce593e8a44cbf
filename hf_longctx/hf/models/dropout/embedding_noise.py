"""NEFTune (`neftune_noise_alpha`): noise on the embeddings of tokens in training, keyed by token as dropout is.

transformers adds noise that is uniform in +- alpha / sqrt(tokens * channels), where the tokens are those of the padded row. Under
a plan, noise is keyed by seed, step, document, position and channel, and a token's row is its own document, whatever it was
packed with or cut into. So any plan draws the same noise. Its distribution is that of transformers for a document alone; the
numbers are others.

Source: Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning", arXiv 2310.05914.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_longctx.hf.models.adapters import base_of
from hf_longctx.runtime.core.dropout import SITE, DropoutKeys, DropoutSite, keys_of

# attributes of an embedding: alpha, and the handle of its hook
_ALPHA, _HANDLE = "_longctx_noise_alpha", "_longctx_noise_handle"


def key_noise(model: nn.Module, alpha: float) -> None:
    """Lets the embedding of `model` add noise by token in training under plans; call it after `key_dropouts`."""
    rest_noise(model)
    base = base_of(model)
    embedding: Any = base.get_input_embeddings()
    name = next(name for name, module in base.named_modules() if module is embedding)
    own = vars(embedding)
    own[SITE], own[_ALPHA] = DropoutSite(keys_of(model) or DropoutKeys(), f"{name} noise"), float(alpha)
    own[_HANDLE] = embedding.register_forward_hook(_noisy)


def rest_noise(model: nn.Module) -> None:
    """Undoes `key_noise`. Idempotent."""
    for module in model.modules():
        if (handle := vars(module).pop(_HANDLE, None)) is not None:
            handle.remove()
            del vars(module)[SITE], vars(module)[_ALPHA]


def noise_problems(alpha: float | None, started_alpha: float | None) -> list[str]:
    """The problem with a trainer's `alpha` if it is not the one with which its run was started, `started_alpha`."""
    if alpha == started_alpha:
        return []
    return [
        f"the trainer's neftune_noise_alpha was set to {alpha!r}, but its plans were started with {started_alpha!r} and draw "
        f"their noise by that; set neftune_noise_alpha in TrainingArguments before the trainer is made, or attached"
    ]


def _noisy(embedding: Any, args: Any, output: Tensor) -> Tensor:
    """Forward hook: the embeddings [1, T, C] with noise; unchanged in evaluation, and in forwards without a plan."""
    site: DropoutSite = vars(embedding)[SITE]
    if not embedding.training:
        return output
    if (tokens := site.keys.tokens) is None:
        if site.keys.is_training:
            raise RuntimeError(
                f"the embedding {site.name} ran outside of a plan during a training with neftune_noise_alpha; call model.eval() "
                f"before forwards of your own"
            )
        return output
    num_channels, alpha = output.shape[-1], vars(embedding)[_ALPHA]
    noise_TC = output.new_empty(len(tokens.positions_T), num_channels)
    for block, uniform_NC in tokens.uniform(num_channels, site.name):
        wide = uniform_NC.to(torch.promote_types(output.dtype, torch.float32))
        sizes_N1 = tokens.lengths_T[block].to(wide.dtype).unsqueeze(1) * num_channels
        noise_TC[block] = (2 * wide - 1) * (alpha / sizes_N1.sqrt())
    # in place, since the noise is as large as the embeddings and of no further use
    return noise_TC.view(output.shape).add_(output)
