"""Runs a saved step alone, on one process as plain transformers: `hf-longctx replay`. See `nonfinite.py`, which saves it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import AutoPeftModelForCausalLM
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longctx.hf.models.patch import patch_model
from hf_longctx.hf.run.nonfinite import MODEL_FOLDER, STEP_FILE, ModelOrder, watched
from hf_longctx.hf.start.losses import loss_name
from hf_longctx.plan.core.serialize import plan_from_json
from hf_longctx.runtime.core.chunk_inputs import ChunkInputs
from hf_longctx.runtime.core.dropout import keys_of
from hf_longctx.runtime.core.loss import Targets, summed_loss
from hf_longctx.runtime.parameters.gradients import nonfinite_names


def replay(folder: Path, model_folder: Path | None = None, tell: Callable[[str], None] = print) -> bool:
    """Runs the sequences of a saved step one by one, forward and backward; returns whether all losses and gradients are finite.

    Prints each sequence's loss and, for the first one that is not finite, the module with the first such output. model_folder:
    another model than the one saved with the step. Raises ValueError for a folder without a step that this version can read.
    """
    content = _read(folder / STEP_FILE)
    source = model_folder or folder / MODEL_FOLDER
    if (kind := content.get("head", "next_token")) != "next_token":
        raise ValueError(
            f"{folder} holds a step of a model that classifies {kind}s, which cannot be replayed; load {source} yourself"
        )
    if content.get("has_media"):
        raise ValueError(
            f"{folder} holds a step of rows with images, whose pixels are not saved; train on these rows alone instead"
        )
    is_adapter = any(source.glob("adapter_config.json")) or any(source.glob("*/adapter_config.json"))
    model: Any = _adapted_model(source, content.get("adapters", ["default"])) if is_adapter else _whole_model(source)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).train()
    tell(f"step {content['step']}, whose loss was {content['loss']}, on {device} as plain transformers, model {source}")
    if (trained := content.get("loss_of_a_token", plain := loss_name(None))) != plain:
        tell(f"the run trained {trained}, which is not saved with the step; losses here are cross-entropy")
    drop, num_documents = _dropout_of(model, content), 0
    for number, saved in enumerate(content["plans"]):
        plan = plan_from_json(json.dumps(saved["plan"]))
        tell(f"plan {number}: {plan.layout}, {len(plan.lengths)} sequences")
        for sequence, tokens in enumerate(saved["sequences"]):
            ids_1T = torch.tensor([tokens["input_ids"]], device=device)
            labels_1T = torch.tensor([tokens["shift_labels"]], device=device)
            found: list[tuple[ModelOrder, str]] = []
            weights = [tokens["loss_weights"]] if "loss_weights" in tokens else None
            weights_1T = None if weights is None else torch.tensor(weights, dtype=torch.float64, device=device)
            targets = Targets.of(ChunkInputs(ids_1T, ids_1T, labels_1T, weights_1T))
            masks = drop(num_documents + sequence, ids_1T)
            with masks, watched(model, 0, found), torch.autocast(device.type, torch.bfloat16, enabled=content["bf16"]):
                loss = summed_loss(model(input_ids=ids_1T, use_cache=False).logits, targets)
            loss.backward()
            gradients = nonfinite_names(model, of_gradients=True)
            model.zero_grad(set_to_none=True)
            tell(f"  sequence {sequence}: {ids_1T.shape[1]} tokens, summed loss {float(loss.detach()):g}")
            if found or gradients or not math.isfinite(float(loss.detach())):
                tell(f"  first output that is not finite: {found[0][1]}" if found else "  all outputs are finite")
                if gradients:
                    tell(f"  {len(gradients)} weights get gradients that are not finite, the last of them {gradients[-1]}")
                return False
        num_documents += len(plan.lengths)
    tell("every loss and gradient is finite: the fault is in the plan or was in the machine; please report the step")
    return True


def _adapted_model(source: Path, active: list[str]) -> Any:
    """The model with the adapters that were active, each from its own folder."""
    folders = {name: source if name == "default" else source / name for name in active}
    model = AutoPeftModelForCausalLM.from_pretrained(folders[active[0]], adapter_name=active[0], is_trainable=True)
    for name in active[1:]:
        model.load_adapter(str(folders[name]), name, is_trainable=True)
    model.base_model.set_adapter(active)
    return model


def _whole_model(source: Path) -> Any:
    """The saved model, of the class that wrote it, which a multimodal model's config does not map to a causal one."""
    (name, *_) = AutoConfig.from_pretrained(source).architectures or ("AutoModelForCausalLM",)
    return getattr(transformers, name, AutoModelForCausalLM).from_pretrained(source)


def _dropout_of(model: Any, content: dict[str, Any]) -> Callable[[int, Tensor], AbstractContextManager[None]]:
    """Function of (number of a sequence in the step, its tokens [1, T]); in its context dropout draws the masks of the run."""
    if "dropout" not in content:
        return lambda document, ids_1T: nullcontext()
    # attention weights are dropped by the attention function
    patch_model(model)
    keys = keys_of(model)
    assert keys is not None
    keys.seed = content["dropout"]["seed"]
    keys.begin_step(content["dropout"]["step"], {})

    def drop(document: int, ids_1T: Tensor) -> AbstractContextManager[None]:
        positions_T = torch.arange(ids_1T.shape[1], device=ids_1T.device)
        return keys.of_pieces([(len(positions_T), document)], positions_T.view(1, -1)).running()

    return drop


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}; give the folder nonfinite-step-N that the run has written") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{file} is no saved step ({error}); give the folder nonfinite-step-N that the run has written"
        ) from None
    if not isinstance(content, dict) or content.get("format") != 1 or "plans" not in content:
        raise ValueError(f"{file} is no saved step of format 1; give the folder nonfinite-step-N that the run has written")
    return content
