"""Lets vLLM generate on the devices of a training, in TRL's colocated mode: one of the two sleeps while the other works.

TRL starts vLLM in each process, and lets it sleep after each generation. Here the training gives up its memory too: states of the
optimizer before vLLM gets new weights, and all weights with their gradients before it makes room for keys and values. They come
back, bit for bit, after the generation. vLLM gets whole weights, one at a time, by its own `reload_weights`, since it keeps some
of them, such as experts, in another layout than that of a checkpoint. Not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_longctx.hf.checkpoints.weight_source import WeightSource
from hf_longctx.runtime.parameters.away import Away, Kind

# tensors of a training, by kind
Owned = Callable[[], dict[Kind, list[Any]]]


class Colocated:
    """Generation by TRL's `VLLMGeneration` in this process, in place of its own `sync_weights` and `generate`.

    weights: of the model in training; reading them is collective. owned: what the training keeps on the device.
    """

    def __init__(self, generation: Any, weights: Callable[[], WeightSource], owned: Owned, away: Away) -> None:
        self.generation, self._weights, self._owned, self._away = generation, weights, owned, away
        self._generate = generation.generate
        generation.sync_weights, generation.generate = self.sync_weights, self.generate

    def sync_weights(self) -> None:
        """Wakes vLLM's memory for weights, and fills it. Collective over all ranks if the model is sharded."""
        llm = self.generation.llm
        self._away.restore("weights")
        self._away.move("states", self._owned()["states"])
        if self.generation._llm_weights_sleeping:
            llm.wake_up(tags=["weights"])
            self.generation._llm_weights_sleeping = False
        runner = llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=iter(self._weights()))
        llm.reset_prefix_cache()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generates as TRL does, while nothing of the training is on the device."""
        if self.generation._llm_weights_sleeping:
            self.sync_weights()
        for kind, tensors in self._owned().items():
            self._away.move(kind, tensors)
        try:
            return self._generate(*args, **kwargs)
        finally:
            # also after an error, since freed memory must not be read
            self.come_back()

    def come_back(self) -> None:
        """Puts the training back on the device."""
        self._away.restore("weights", "states")
