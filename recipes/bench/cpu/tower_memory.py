"""Counts the peak memory of one document with many images in slices: towers in chunks against all towers first.

    python recipes/bench/cpu/tower_memory.py [--images 24] [--slices 6] [--json FILE]

The model is a Qwen3-VL with random weights in fp32 (text: four layers of width 128; tower: four layers of width 128 and two
deepstack levels), all of it trained, in one process. Each image has 64 patches, which become 16 tokens. All methods run one plan,
which recomputes the layers of the text model, so that they differ in their towers alone:

- "all towers first": as systems that merge whole documents before they divide them. All towers run with their graphs before the
  first slice, and their backward comes after that of the last slice.
- "kept": towers run in the chunk of their tokens, and graphs wait for its backward, as plans with enough room let them.
- "again": towers run once more in the chunk's backward, image by image, as plans without room let them.

Columns: `peak` is the most bytes of live tensors during forward and backward, above those before, counted operation by operation;
`gradient` is the largest difference from the first method over all weights, relative to the largest value of each.
"""

from __future__ import annotations

import argparse
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from hf_longctx.families.family import MediumKind
from hf_longctx.hf.data.collator import LongContextCollator, PlannedDataset, PlannedStep
from hf_longctx.hf.data.media.rows import Medium
from hf_longctx.hf.data.sampler import SequenceIndex
from hf_longctx.hf.models import media
from hf_longctx.hf.models.attention import num_attention_layers
from hf_longctx.hf.models.layers import layer_modules
from hf_longctx.hf.models.patch import patch_model
from hf_longctx.plan.core.types import (
    Action,
    ActivationPolicy,
    Chunk,
    LayerPolicy,
    LayerRange,
    MicroBatch,
    SequenceGroup,
    Span,
    StagePlan,
    StepPlan,
    TensorShare,
)
from hf_longctx.plan.core.validate import validate_plan
from hf_longctx.runtime.activations.engine import ActivationEngine
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.core.chunk_inputs import TowerInputs
from hf_longctx.runtime.execution.executor import StepExecutor
from hf_longctx.runtime.execution.stage_model import whole_model
from hf_longctx.runtime.process_groups import GroupPool

LAYERS, SIDE, IMAGE, START, END = 4, 8, 1000, 1001, 1002
CPU = torch.device("cpu")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, while they live. peak: the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, list | tuple) else [found]:
            if isinstance(each, Tensor) and func.namespace == "aten" and not func.is_view:
                self._note(each.untyped_storage())
        return found

    def _note(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place not in self.known:
            self.known.add(place)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, place, size)

    def _forget(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.now -= size


def model_of() -> Any:
    """The model, with equal weights in every call."""
    torch.manual_seed(0)
    config = Qwen3VLConfig(
        text_config={
            **{"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": LAYERS},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1 << 20},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]},
        },
        vision_config={
            **{"depth": 4, "hidden_size": 128, "intermediate_size": 352, "num_heads": 4, "patch_size": 8},
            **{"out_hidden_size": 128, "num_position_embeddings": 64, "deepstack_visual_indexes": [1, 3]},
        },
        **{"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": 1003},
    )
    return Qwen3VLForConditionalGeneration(config).train()


@dataclass(frozen=True)
class Reader:
    """Makes the patches of image i from its number."""

    positions_of: media.MediaPositions

    @property
    def tokens(self) -> Mapping[MediumKind, int]:
        return {"image": IMAGE}

    def tower_inputs(self, medium: Medium, file: Mapping[str, Any], ids: Sequence[int], where: str) -> TowerInputs:
        pixels = torch.randn(SIDE * SIDE, 3 * 2 * 8 * 8, generator=torch.Generator().manual_seed(int(file["path"])))
        grid = torch.tensor([[1, SIDE, SIDE]])
        return TowerInputs("image", {"pixel_values": pixels, "image_grid_thw": grid}, medium.num_features)

    def positions(self, ids: Tensor, found: Sequence[Medium]) -> Tensor | None:
        return self.positions_of.of(ids, [(each.kind, each.start, each.stop, each.grid, each.seconds) for each in found])


def row_of(num_images: int) -> dict[str, Any]:
    """A document with images between texts of 32 tokens."""
    rng, ids, found = np.random.default_rng(0), list[int](), list[dict[str, Any]]()
    for _ in range(num_images):
        ids += rng.integers(0, 900, 32).tolist()
        begin = len(ids)
        ids += [START, *[IMAGE] * (SIDE * SIDE // 4), END]
        found.append(Medium("image", begin, len(ids), SIDE * SIDE // 4, (1, SIDE, SIDE)).as_item())
    ids += rng.integers(0, 900, 32).tolist()
    labels = [-100 if token >= IMAGE else token for token in ids]
    files = [{"path": str(number), "bytes": None} for number in range(num_images)]
    return {"input_ids": ids, "labels": labels, "media": found, "media_files": files}


def plan_of(length: int, num_slices: int) -> StepPlan:
    """Equal slices of one document, whose layers are recomputed."""
    bounds = [length * index // num_slices for index in range(num_slices + 1)]
    chunks = tuple(Chunk(i, (Span(0, bounds[i], bounds[i + 1]),)) for i in range(num_slices))
    order = [("F", i) for i in range(num_slices)] + [("B", i) for i in reversed(range(num_slices))]
    actions = tuple(Action(kind, 0, i) for kind, i in order)  # type: ignore[arg-type]
    layer = LayerPolicy(tuple(TensorShare(name, recompute=1.0) for name in ("attention_output", "qkv", "mlp")))
    policies = tuple(ActivationPolicy(i, layers=(layer,) * LAYERS) for i in range(num_slices))
    stage = StagePlan(0, (LayerRange(0, LAYERS),), actions, policies)
    group = SequenceGroup((0,), "local", chunks, (stage,))
    return validate_plan(StepPlan(0, (length,), 1, 1, "replicated", (MicroBatch((group,)),)))


class Step:
    """One step of a method: "all towers first", "kept" or "again"."""

    def __init__(self, method: str, row: dict[str, Any], num_slices: int) -> None:
        self.method, self.model, length = method, model_of(), len(row["input_ids"])
        patch_model(self.model)
        self.around = media.around_text(self.model)
        positions = media.MediaPositions.of_model(self.model)
        assert positions is not None
        self.reader, self.row = Reader(positions), row
        index = SequenceIndex.build(np.array([length]), length, "error")
        self.plan = plan_of(length, num_slices)
        dataset = PlannedDataset([row], index, reader=self.reader)
        self.chunks = LongContextCollator()([dataset[PlannedStep(self.plan, (0,), 0)]])["chunks"]
        self.num_labels = sum(label != -100 for label in row["labels"][1:])
        self.engine = ActivationEngine(layer_modules(self.model), HostTier.on(CPU, 1 << 20))
        self.executor = StepExecutor(whole_model(self.model, num_attention_layers(self.model)), GroupPool((1,), 1.0), CPU)

    def __call__(self) -> None:
        self.model.zero_grad()
        graphs = media.tower_graphs(self.model)
        assert graphs is not None
        graphs.begin(1 << 40 if self.method == "kept" else 0)
        finish = self._all_first(graphs) if self.method == "all towers first" else None
        self.executor.run(self.plan.for_rank(0), self.chunks, self.num_labels, engine=self.engine)
        if finish is not None:
            finish()

    def _all_first(self, graphs: media.TowerGraphs) -> Callable[[], None]:
        pairs = zip(self.row["media"], self.row["media_files"], strict=True)
        inputs = [self.reader.tower_inputs(Medium.of(item), file, (), "") for item, file in pairs]
        made = [media.feature_tables(self.around, each) for each in inputs]
        leaves = [[table.detach().requires_grad_() for table in tables] for tables in made]

        def ready(_: Any, medium: TowerInputs) -> list[Tensor]:
            pixels = medium.tensors["pixel_values"]
            pairs = zip(leaves, inputs, strict=True)
            return next(own for own, each in pairs if torch.equal(each.tensors["pixel_values"], pixels))

        vars(graphs)["features"] = ready

        def finish() -> None:
            for tables, own in zip(made, leaves, strict=True):
                torch.autograd.backward(tables, [each.grad for each in own])

        return finish


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--slices", type=int, default=6)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    row = row_of(arguments.images)
    print(f"{arguments.images} images, {len(row['input_ids'])} tokens in {arguments.slices} slices")
    expected: dict[str, Tensor] = {}
    found = []
    for method in ("all towers first", "kept", "again"):
        step = Step(method, row, arguments.slices)
        with LiveBytes() as live:
            step()
        gradients = {name: p.grad for name, p in step.model.named_parameters() if p.grad is not None}
        expected = expected or {name: each.clone() for name, each in gradients.items()}
        # keys have biases without a gradient but noise
        scales = {name: float(each.abs().max()) for name, each in expected.items()}
        large = [name for name, scale in scales.items() if scale > 1e-7]
        worst = max(float((gradients[name] - expected[name]).abs().max()) / scales[name] for name in large)
        found.append({"method": method, "peak_mib": live.peak / 2**20, "gradient": worst})
        print(f"{method:18} peak {live.peak / 2**20:8.1f} MiB  gradient {worst:.0e}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
