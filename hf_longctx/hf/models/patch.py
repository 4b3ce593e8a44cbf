"""Lists the changes to a model's instances that plans need, and applies or undoes all of them.

Each peculiarity of model classes has a file that reads it, refuses it and patches it. No class and no module of transformers is
changed, so other models of the process run as before.
"""

from __future__ import annotations

from typing import Any, Protocol

from hf_longctx.hf.models.attention import AttentionSwitch, attention_name, attention_problems, runs_plans
from hf_longctx.hf.models.compressed import CompressedPatch
from hf_longctx.hf.models.context import ContextPatch
from hf_longctx.hf.models.document_rope import DocumentRopePatch
from hf_longctx.hf.models.dropout import DropoutPatch
from hf_longctx.hf.models.heads import HeadPatch
from hf_longctx.hf.models.index import IndexPatch
from hf_longctx.hf.models.media import MediaPatch
from hf_longctx.hf.models.own_attention import OwnAttentionPatch
from hf_longctx.hf.models.positions import PaddingPatch, RowPositionsPatch
from hf_longctx.hf.models.quantised import QuantisedPatch
from hf_longctx.hf.models.states import MixerPatch
from hf_longctx.hf.models.towers import NoImagesPatch, TextPatch


class Patch(Protocol):
    """One change of a model's instances that can be undone."""

    def needed(self, model: Any) -> bool:
        """Whether the model has what this patch changes."""

    def apply(self, model: Any) -> None:
        """Changes the instances. Idempotent; a deep copy of the model has the change, too.

        Raises ValueError if other code has replaced the class's forward.
        """

    def undo(self, model: Any) -> None:
        """Leaves the model as it was. Idempotent; leaves a forward that accelerate has wrapped since."""


# in the order in which they are applied; the switch of attention comes last, and marks a model that runs plans
PATCHES: tuple[Patch, ...] = (
    TextPatch(),
    NoImagesPatch(),
    MediaPatch(),
    HeadPatch(),
    OwnAttentionPatch(),
    DocumentRopePatch(),
    PaddingPatch(),
    RowPositionsPatch(),
    MixerPatch(),
    IndexPatch(),
    CompressedPatch(),
    DropoutPatch(),
    ContextPatch(),
    QuantisedPatch(),
    AttentionSwitch(),
)


def patch_model(model: Any) -> None:
    """Makes `model` run plans. Idempotent. In a multimodal model, only the text model attends under plans.

    Raises ValueError for an attention implementation of other code (`attention_problems`), and if a patch raises it; the model
    is then unchanged.
    """
    if problems := attention_problems(model):
        raise ValueError(problems[0])
    ran_plans = runs_plans(model)
    try:
        for patch in PATCHES:
            if patch.needed(model):
                patch.apply(model)
    except BaseException:
        # another run may still need the patches of a model that ran plans before
        if not ran_plans:
            _undo_all(model)
        raise


def restore_attention(model: Any, name: str | None) -> None:
    """Undoes `patch_model`, unless `model` ran plans before. Idempotent. name: what `attention_name` returned before."""
    if name is not None and attention_name(model) != name:
        _undo_all(model)


def _undo_all(model: Any) -> None:
    for patch in reversed(PATCHES):
        patch.undo(model)
