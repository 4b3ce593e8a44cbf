"""Sends whole weights to a vLLM server, in place of TRL's own way, which waits for ever if the server fails.

TRL asks the server to receive and then broadcasts one weight after another, in a call that nothing ends. If the server answers
with an error, TRL's client repeats the request, so that the server would read from the middle of the stream, or never reads and
the broadcast waits. Here each request is made once, and the transfer runs in a thread. As soon as a request fails, or nothing has
moved for the time limit, every rank raises an error that names the server. Other ranks walk through the weights too, since
gathering shards is collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_longctx.hf.checkpoints.weight_source import WeightSource
from hf_longctx.hf.ranks.agreement import raise_together

# fields of TRL's `VLLMGeneration` that its client's `generate` takes by the same names
_SAMPLING = ("repetition_penalty", "temperature", "top_p", "top_k", "logprobs", "structured_outputs_regex", "generation_kwargs")
# between two looks at the transfer
_POLL_S = 0.05


def send_weights(generation: Any, source: WeightSource, control: dist.ProcessGroup | None) -> None:
    """Sends the weights of `source` to the server of TRL's `VLLMGeneration`, and empties its prefix cache. Collective.

    Rank 0 sends. The limit is TRL's `vllm_server_timeout`, for a request and for a pause between two weights. Raises RefusedRun
    on every rank if the transfer fails on rank 0.
    """
    problems: list[str] = []
    if generation.accelerator.is_main_process:
        transfer = _Transfer(generation.vllm_client, float(generation.server_timeout), generation.accelerator.device)
        problems += transfer.run(source)
    else:
        for _ in source:
            # gathered together
            pass
    raise_together(problems, control, "the weights could not be sent")


def generates_apart(trainer: Any) -> bool:
    """Whether ranks must ask the server apart: in TRL's loop over calls of tools, each ends when its own rows have none.

    TRL gathers the prompts of all ranks and gives each as many completions as rank 0 has, so ranks would wait for each other, or
    get the completions of other rows.
    """
    return bool(getattr(trainer, "tools", None)) and trainer.accelerator.num_processes > 1


def own_client(generation: Any) -> Any:
    """A client of the same server for this rank, which generates but sends no weights."""
    if generation.accelerator.is_main_process:
        return generation.vllm_client
    from trl.generation import vllm_generation

    url = generation.server_base_url or f"http://{generation.server_host}:{generation.server_port}"
    return vllm_generation.VLLMClient(base_url=url, connection_timeout=generation.server_timeout)


def generate_apart(
    generation: Any, client: Any, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
) -> Any:
    """Generates completions of this rank's prompts by its own `client`; returns a tuple as TRL's `generate` does."""
    # a group of completions may lie on two ranks
    is_grouped = all(prompt == prompts[place - place % num_generations] for place, prompt in enumerate(prompts))
    count = num_generations if is_grouped and len(prompts) % num_generations == 0 else 1
    settings = {name: getattr(generation, name) for name in _SAMPLING}
    with nullcontext() if profiler is None else profiler:
        found = client.generate(
            prompts=prompts[::count],
            n=count,
            max_tokens=generation.max_completion_length,
            min_p=generation.min_p or 0.0,
            **settings,
        )
    prompt_ids = [ids for ids in found["prompt_ids"] for _ in range(count)]
    return prompt_ids, found["completion_ids"], found["logprobs"], found.get("logprob_token_ids")


class _Transfer:
    """One transfer to a server. client: TRL's `VLLMClient`. device: of the weights; a thread has a current device of its own."""

    def __init__(self, client: Any, limit_s: float, device: torch.device) -> None:
        self.client, self.limit_s, self.device = client, limit_s, device
        self._is_over, self._gathers = threading.Event(), threading.Lock()
        self._problems: list[str] = []
        # an error of this rank's own gathers, for which the other ranks would wait
        self._error: BaseException | None = None
        # time of the last weight or answer
        self._moved_s, self._doing = time.monotonic(), "the first request"

    def run(self, source: WeightSource) -> list[str]:
        """Sends all weights, and gathers what the server has not taken; returns what went wrong."""
        weights, client = iter(source), self.client
        metadata = [(name, str(dtype).removeprefix("torch."), list(shape)) for name, dtype, shape in source.metadata()]
        vars(client)["_post"] = self._post
        # a call that hangs in the backend ends with the process
        threading.Thread(target=self._send, args=(metadata, weights), name="longctx-weights", daemon=True).start()
        try:
            while not self._is_over.wait(_POLL_S):
                if time.monotonic() - self._moved_s > self.limit_s:
                    self._fail(f"nothing has moved for {self.limit_s:.0f} s in {self._doing}")
        finally:
            del vars(client)["_post"]
        if not self._gathers.acquire(timeout=self.limit_s):
            raise RuntimeError(f"gathering weights has hung; {self._problems[0]}")
        if self._error is not None:
            raise self._error
        for _ in weights:
            # the other ranks gather to the end
            pass
        return self._problems

    def _send(self, metadata: list[tuple[str, str, list[int]]], weights: Iterator[tuple[str, Tensor]]) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            self.client.update_named_params(metadata, self._counted(weights))
            self.client.reset_prefix_cache()
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")
        self._is_over.set()

    def _counted(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        while True:
            with self._gathers:
                if self._problems:
                    return
                try:
                    pair = next(weights, None)
                except BaseException as error:
                    self._error = error
                    self._fail("a weight could not be gathered")
                    raise
            if pair is None:
                return
            self._moved_s, self._doing = time.monotonic(), f"the transfer of {pair[0]}"
            yield pair

    def _post(self, url: str, **kwargs: Any) -> Any:
        """Makes a request once, in place of the client's method, which repeats those that fail."""
        self._moved_s = time.monotonic()
        try:
            # a session of the same kind, without the client's retries
            with type(self.client.session)() as session:
                response = session.post(url, timeout=self.limit_s, **kwargs)
            if response.status_code != 200:
                raise RuntimeError(f"{url} answered {response.status_code}: {response.text[:500]}")
        except Exception as error:
            self._fail(str(error))
            raise
        self._moved_s = time.monotonic()
        return response.json()

    def _fail(self, problem: str) -> None:
        """Ends the wait; the first problem is the cause of the others."""
        if not self._problems:
            self._problems.append(
                f"the vLLM server at {self.client.base_url} did not take the weights ({problem}); look at its log, start it "
                f"again, and raise vllm_server_timeout ({self.limit_s:.0f} s) if it only needs more time"
            )
        self._is_over.set()
