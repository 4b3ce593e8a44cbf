"""The asynchronous loop trains while a server generates, and sends it the weights of every step."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.tiny_models import ModelCase, build_model
from helpers.ranks.rank_pool import RankFailure
from helpers.servers.stub_vllm import stub_server
from helpers.trainers.stock_runs import quiet_config

from hf_longctx import LongContextEngine
from hf_longctx.recipes.async_rl import Server, train


def reward(completion: list[int]) -> float:
    return sum(completion) % 7 / 7


def trained(url: str, folder: str, config: dict[str, Any], staleness: int, num_steps: int = 3) -> list[dict[str, float]]:
    engine = LongContextEngine(
        build_model(ModelCase()),
        quiet_config(tokens_per_rank=60, max_length=64, **config),
        lambda weights: torch.optim.SGD(weights, lr=0.1),
        output_dir=f"{folder}/out",
    )
    prompts = ([5 + number % 20, 9, 7 + number % 3] for number in itertools.count())
    settings = {"num_steps": num_steps, "groups_per_step": 2, "count": 3, "max_tokens": 12, "threads": 2}
    try:
        return train(engine, Server(url, folder), prompts, reward, max_staleness=staleness, **settings)
    finally:
        engine.close()


@pytest.mark.wide
@pytest.mark.parametrize(
    "num_ranks,staleness,config", [(1, 0, {}), (2, 1, {"parameters": "sharded"})], ids=["one rank", "sharded"]
)
def test_the_loop_trains_and_the_server_follows(
    ranks, tmp_path: Path, num_ranks: int, staleness: int, config: dict[str, Any]
) -> None:
    with stub_server(build_model(ModelCase(seed=9))) as server:
        logs = ranks(num_ranks).run(trained, server.url, str(tmp_path), config, staleness)
    for log in zip(*logs, strict=True):
        assert len({each["norm"] for each in log}) == 1 and log[0]["norm"] > 0
        # two groups of three rows, of any rank
        assert sum(each["rows"] for each in log) == 6
        # fresh rows have the values of the weights that were sent
        assert max(each["difference"] for each in log) < 1e-6
    sends = [name for name in server.requests if name != "v1/completions"]
    assert sends == ["pause", "collective_rpc", "reset_prefix_cache", "resume"] * 4


def test_a_server_that_fails_ends_the_loop(ranks, tmp_path: Path) -> None:
    with stub_server(build_model(ModelCase()), fault="v1/completions") as server, pytest.raises(RankFailure) as raised:
        ranks(1).run(trained, server.url, str(tmp_path), {}, 0)
    assert f"{server.url}/v1/completions answered 500" in str(raised.value)
