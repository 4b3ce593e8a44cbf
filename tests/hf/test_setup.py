"""The start of planning: what every rank must agree on before groups are made."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from helpers.models import ModelCase, build_model

from hf_longctx.hf.config import LongContextConfig
from hf_longctx.hf.setup import planning_setup
from hf_longctx.plan.cost import block_sizes


def blocks_of_pool(ranks_on_node: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Ranks per node and sizes of blocks that this rank plans with, on a node of `ranks_on_node[rank]` ranks."""
    arguments: Any = SimpleNamespace(bf16=False, device=torch.device("cpu"), world_size=dist.get_world_size())
    config = replace(LongContextConfig(), method="hybrid")
    with patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks_on_node[dist.get_rank()])):
        setup = planning_setup(config, build_model(ModelCase()), arguments, (1, 2), dist.group.WORLD)
    return setup.costs.cluster.ranks_per_node, block_sizes(setup.planner.degrees, setup.costs)


def test_ranks_of_unequal_nodes_make_the_same_groups(ranks) -> None:
    # a node of two ranks and a node of one: groups that only some ranks make would hang the others
    assert ranks(3).run(blocks_of_pool, (2, 2, 1)) == [(1, ())] * 3


def test_blocks_stay_inside_equal_nodes(ranks) -> None:
    assert ranks(4).run(blocks_of_pool, (2, 2, 2, 2)) == [(2, (2,))] * 4
