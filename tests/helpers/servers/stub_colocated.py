"""A stand-in for vLLM inside the processes of a training: `LLM` as TRL uses it, with a model of transformers."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import transformers
from helpers.servers.stub_vllm import StubServer, tabled


class StubLLM:
    """Completions as of `StubServer`. A sleeping model has lost its weights, and may do nothing."""

    # instances of this process, and a call before each generation
    made: ClassVar[list[StubLLM]] = []
    watch: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    def __init__(self, model: str, **_: Any) -> None:
        self.computes = object.__new__(StubServer)
        found = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        self.computes.model, self.computes.write = found, tabled
        self.calls: list[str] = []
        worker = SimpleNamespace(model_runner=self)
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
        self.awake = {"weights", "kv_cache"}
        StubLLM.made.append(self)

    def sleep(self, level: int) -> None:
        assert level == 2 and self.awake == {"weights", "kv_cache"}
        self.awake = set()
        self.calls.append("sleep")
        for weight in self.computes.model.parameters():
            weight.data.fill_(float("nan"))

    def wake_up(self, tags: list[str]) -> None:
        self.awake |= set(tags)
        self.calls += tags

    def reset_prefix_cache(self) -> None:
        assert "weights" in self.awake

    def reload_weights(self, weights_iterator: Any) -> None:
        assert self.awake == {"weights"}
        self.calls.append("reload")
        self.computes._weights = {name: weight.clone() for name, weight in weights_iterator}
        self.computes._load()

    def generate(self, prompts: list[dict[str, Any]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        assert self.awake == {"weights", "kv_cache"}
        self.calls.append("generate")
        StubLLM.watch()
        places, made = Counter[tuple[int, ...]](), []
        for prompt in (each["prompt_token_ids"] for each in prompts):
            place = places[tuple(prompt)]
            places[tuple(prompt)] += 1
            body = {"prompt": [prompt], "n": place + 1, "temperature": sampling_params.temperature}
            body["max_tokens"] = sampling_params.max_tokens
            choice = self.computes._completions(body)["choices"][place]
            values = [
                {token: SimpleNamespace(rank=1, logprob=value)}
                for token, value in zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
            ]
            output = SimpleNamespace(token_ids=choice["token_ids"], logprobs=values)
            made.append(SimpleNamespace(prompt_token_ids=prompt, outputs=[output]))
        return made


@contextlib.contextmanager
def stub_colocated() -> Iterator[list[StubLLM]]:
    """Context in which TRL believes that vLLM is installed, and makes `StubLLM`; yields those that it makes."""
    from trl.generation import vllm_generation

    StubLLM.made.clear()
    with (
        patch.object(vllm_generation, "is_vllm_available", lambda *_, **__: True),
        patch.object(vllm_generation, "LLM", StubLLM, create=True),
        patch.object(vllm_generation, "SamplingParams", SimpleNamespace, create=True),
        # TRL sets variables of a launcher
        patch.dict(os.environ),
    ):
        yield StubLLM.made
