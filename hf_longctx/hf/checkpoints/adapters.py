"""Loads saved adapters into a model; the trainer calls it on resume, `checkpoints.staged` for pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hf_longctx.hf.checkpoints.sharded import sharded_like
from hf_longctx.hf.models.adapters import ADAPTER_FILE, adapter_files


@torch.no_grad()
def load_adapters(model: Any, folder: str, file_names: Mapping[str, str] | None = None) -> None:
    """Copies the adapters saved in `folder` into the adapters of `model`, which may be sharded or one pipeline stage.

    Embedding and head too are read if PEFT has saved them. `file_names`: names of the model's weights that have others in the
    file. Every rank reads its own weights. Raises ValueError if the folder has no adapters in safetensors, or not all weights.
    """
    names = file_names or {}
    frozen = {names.get(name, name): weight for name, weight in model.named_parameters(remove_duplicate=False)}
    files = adapter_files(model)
    for inner, targets in files.items():
        file = Path(folder, inner, ADAPTER_FILE)
        if len(files) == 1 and not file.exists():
            # a lone adapter may have had another name
            file = Path(folder, ADAPTER_FILE)
        if not file.exists():
            raise ValueError(f"{file.parent} has no {file.name}; resume adapters from a checkpoint of these adapters")
        with safe_open(file, framework="pt", device="cpu") as reader:
            if missing := sorted(set(targets) - set(reader.keys())):
                raise ValueError(
                    f"{file} lacks {len(missing)} weights of this model's adapters (the first is {missing[0]}); resume with the "
                    f"config of the saved adapters"
                )
            known = targets | {name: frozen[name] for name in reader.keys() if name in frozen}  # noqa: SIM118 (not a mapping)
            for name, target in known.items():
                target.copy_(sharded_like(target, reader.get_tensor(name)))
