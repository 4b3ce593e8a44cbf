"""Fine-tune Hugging Face causal language models on long, length-skewed sequences with one plan per training step.

Public names are loaded on first use (PEP 562), so that `import hf_longctx.plan` and the command line start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_longctx._version import __version__

if TYPE_CHECKING:
    from hf_longctx.hf.callback.callback import LongContextCallback
    from hf_longctx.hf.config import LongContextConfig
    from hf_longctx.hf.data.chat import DataError
    from hf_longctx.hf.data.mixture import mix_datasets
    from hf_longctx.hf.data.streams.sources import ShardedStream
    from hf_longctx.hf.data.tokenise import tokenise_chat, tokenise_completions, tokenise_text
    from hf_longctx.hf.engine import LongContextEngine, RowValues, TokenRow
    from hf_longctx.hf.evaluation.long_evaluation import LongContextEvaluation
    from hf_longctx.hf.evaluation.needles import NeedleTask, passkeys
    from hf_longctx.hf.models.packed_experts import pack_experts
    from hf_longctx.hf.models.rope import extend_positions
    from hf_longctx.hf.ranks.exit_message import refusals_last
    from hf_longctx.hf.rules.deepspeed import from_deepspeed
    from hf_longctx.hf.start.sharded_loading import load_sharded
    from hf_longctx.hf.start.stages import load_pipeline_stage
    from hf_longctx.hf.trainer.muon import MuonWithAdamW
    from hf_longctx.hf.trainer.trainer import LongContextMixin, LongContextTrainer
    from hf_longctx.plan.groups.best_fit import pack_sequences
    from hf_longctx.runtime.core.loss import TokenLoss

_HOMES = {
    "DataError": "hf_longctx.hf.data.chat",
    "LongContextCallback": "hf_longctx.hf.callback.callback",
    "LongContextConfig": "hf_longctx.hf.config",
    "LongContextEngine": "hf_longctx.hf.engine",
    "LongContextEvaluation": "hf_longctx.hf.evaluation.long_evaluation",
    "LongContextMixin": "hf_longctx.hf.trainer.trainer",
    "LongContextTrainer": "hf_longctx.hf.trainer.trainer",
    "MuonWithAdamW": "hf_longctx.hf.trainer.muon",
    "NeedleTask": "hf_longctx.hf.evaluation.needles",
    "RowValues": "hf_longctx.hf.engine",
    "ShardedStream": "hf_longctx.hf.data.streams.sources",
    "TokenLoss": "hf_longctx.runtime.core.loss",
    "TokenRow": "hf_longctx.hf.engine",
    "extend_positions": "hf_longctx.hf.models.rope",
    "from_deepspeed": "hf_longctx.hf.rules.deepspeed",
    "load_pipeline_stage": "hf_longctx.hf.start.stages",
    "load_sharded": "hf_longctx.hf.start.sharded_loading",
    "mix_datasets": "hf_longctx.hf.data.mixture",
    "pack_experts": "hf_longctx.hf.models.packed_experts",
    "pack_sequences": "hf_longctx.plan.groups.best_fit",
    "passkeys": "hf_longctx.hf.evaluation.needles",
    "refusals_last": "hf_longctx.hf.ranks.exit_message",
    "tokenise_chat": "hf_longctx.hf.data.tokenise",
    "tokenise_completions": "hf_longctx.hf.data.tokenise",
    "tokenise_text": "hf_longctx.hf.data.tokenise",
}

__all__ = [
    "DataError",
    "LongContextCallback",
    "LongContextConfig",
    "LongContextEngine",
    "LongContextEvaluation",
    "LongContextMixin",
    "LongContextTrainer",
    "MuonWithAdamW",
    "NeedleTask",
    "RowValues",
    "ShardedStream",
    "TokenLoss",
    "TokenRow",
    "__version__",
    "extend_positions",
    "from_deepspeed",
    "load_pipeline_stage",
    "load_sharded",
    "mix_datasets",
    "pack_experts",
    "pack_sequences",
    "passkeys",
    "refusals_last",
    "tokenise_chat",
    "tokenise_completions",
    "tokenise_text",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
