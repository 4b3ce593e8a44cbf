"""Asynchronous reinforcement learning in a loop of your own: a vLLM server generates while `LongContextEngine` trains.

Threads of rank 0 ask the server for groups of completions, and put them into a queue. Each step takes groups that are not too
stale, deals their rows to all ranks, trains a clipped loss per token against the sampler's log-probabilities, and sends the new
weights: pause, send by way of a folder that server and rank 0 see (such as /dev/shm), resume. Start the server with
`VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs`, and call `train` on every rank (torchrun).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from hf_longctx import LongContextEngine, RowValues, TokenRow


@dataclass
class Sample:
    """A rollout: token ids, the sampler's log-probability of each token of the completion, and the advantage in its group."""

    ids: list[int]
    log_probs: list[float]
    version: int
    advantage: float = 0.0


class Server:
    """A vLLM server. folder: where weights are handed over. version: how often they were."""

    def __init__(self, url: str, folder: str) -> None:
        self.url, self.folder, self.version = url, Path(folder), 0
        self.model = requests.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]

    def post(self, name: str, **body: Any) -> Any:
        answer = requests.post(f"{self.url}/{name}", json=body, timeout=600)
        if answer.status_code != 200:
            raise RuntimeError(f"{self.url}/{name} answered {answer.status_code}: {answer.text[:500]}")
        return answer.json() if answer.text else {}

    def group(self, prompt: list[int], count: int, max_tokens: int) -> list[Sample]:
        """Asks for completions of a prompt; they are as stale as the weights with which they began."""
        version, wanted = self.version, {"n": count, "max_tokens": max_tokens, "temperature": 1.0, "logprobs": 0}
        wanted |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
        found = self.post("v1/completions", model=self.model, prompt=[prompt], **wanted)["choices"]
        return [Sample(prompt + each["token_ids"], each["logprobs"]["token_logprobs"], version) for each in found]

    def take(self, weights: Any, is_sender: bool) -> None:
        """Writes whole weights, which every rank gathers, and makes the server read them while it is paused."""
        kept = {name: tensor.cpu() for name, tensor in weights if is_sender}
        if is_sender:
            save_file(kept, self.folder / "model.safetensors", metadata={"format": "pt"})
            self.post("pause?mode=keep")
            self.post("collective_rpc", method="reload_weights", kwargs={"weights_path": str(self.folder)})
            self.post("reset_prefix_cache")
            self.post("resume")
        self.version += 1


def work(make: Callable[[], list[Sample]], groups: queue.Queue[Any], stop: threading.Event) -> None:
    """Fills a queue with groups, or with the error of one; waits while it is full."""
    while not stop.is_set():
        try:
            made: Any = make()
        except Exception as error:
            made = error
        while not stop.is_set():
            try:
                groups.put(made, timeout=0.2)
                break
            except queue.Full:
                continue


def dealt(groups: queue.Queue[Any], num_groups: int, oldest: int, rank: int, num_ranks: int) -> list[Sample]:
    """Takes groups on rank 0, leaves out those that began before version `oldest`, and returns this rank's rows."""
    taken: list[Any] = []
    while rank == 0 and len(taken) < num_groups:
        group = groups.get()
        if isinstance(group, Exception):
            raise group
        taken += [group] if group[0].version >= oldest else []
    rows = [[sample for group in taken for sample in group]]
    if num_ranks > 1:
        dist.broadcast_object_list(rows, src=0)
    return rows[0][rank::num_ranks]


def clipped_loss(samples: Sequence[Sample], num_tokens: float, version: int, clip: float = 0.2) -> Callable[[RowValues], Any]:
    """The clipped loss of PPO per token, divided by the tokens of all ranks; also the most that server and training differ."""

    def loss(values: RowValues) -> tuple[torch.Tensor, float]:
        total, difference = torch.zeros(()), 0.0
        for sample, log_probs in zip(samples, values.log_probs, strict=True):
            sampled = torch.tensor(sample.log_probs, dtype=log_probs.dtype, device=log_probs.device)
            new = log_probs[len(log_probs) - len(sampled) :]
            ratio = torch.exp(new - sampled)
            total = total - torch.minimum(ratio * sample.advantage, ratio.clamp(1 - clip, 1 + clip) * sample.advantage).sum()
            if sample.version == version:
                difference = max(difference, float((new - sampled).detach().abs().max()))
        return total / num_tokens, difference

    return loss


def train(
    engine: LongContextEngine, server: Server, prompts: Iterator[list[int]], reward: Callable[[list[int]], float],
    num_steps: int, groups_per_step: int = 8, count: int = 8, max_tokens: int = 4096, max_staleness: int = 1, threads: int = 8,
) -> list[dict[str, float]]:  # fmt: skip
    """Trains for `num_steps`; returns the loss, the norm, and how server and training differ, of each step."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    groups, lock, stop, log = queue.Queue[Any](2 * threads), threading.Lock(), threading.Event(), []

    def group() -> list[Sample]:
        with lock:
            prompt = next(prompts)
        made = server.group(prompt, count, max_tokens)
        rewards = torch.tensor([reward(each.ids[len(prompt) :]) for each in made])
        for each, advantage in zip(made, ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist(), strict=True):
            each.advantage = advantage
        return made

    server.take(engine.weights(), rank == 0)
    for _ in range(threads if rank == 0 else 0):
        threading.Thread(target=work, args=(group, groups, stop), daemon=True).start()
    try:
        for _ in range(num_steps):
            samples = dealt(groups, groups_per_step, server.version - max_staleness, rank, num_ranks)
            tokens = torch.tensor(float(sum(len(each.log_probs) for each in samples)))
            if num_ranks > 1:
                dist.all_reduce(tokens)
            marks = [[False] * (len(each.ids) - len(each.log_probs)) + [True] * len(each.log_probs) for each in samples]
            rows = [TokenRow(each.ids, scored) for each, scored in zip(samples, marks, strict=True)]
            # the engine takes the mean over ranks
            loss, difference = engine.forward_backward(rows, clipped_loss(samples, float(tokens) / num_ranks, server.version))
            norm = engine.optimizer_step(max_norm=1.0)
            server.take(engine.weights(), rank == 0)
            log.append({"loss": float(loss), "norm": norm, "difference": difference, "rows": len(rows)})
    finally:
        stop.set()
    return log
