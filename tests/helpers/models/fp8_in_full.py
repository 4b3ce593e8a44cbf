"""Products in fp8 with inputs that are not rounded, in fp64: the products of the unpacked weights, by the paths of fp8."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from helpers.models.tiny_models import ModelCase
from helpers.ranks.pipeline_steps import stage_step_on_rank
from helpers.ranks.rank_steps import step_on_rank
from torch import Tensor

from hf_longctx.kernels.fp8_rows import round_rows
from hf_longctx.runtime.core import fp8, products


@contextmanager
def in_fp64() -> Iterator[None]:
    """Context in which weights are rounded as ever, but the inputs of their products are not."""

    def multiply(x_TC: Tensor, scale_T1: Tensor, bytes_NC: Tensor, scale_N1: Tensor, dtype: Any, bias_N: Any = None) -> Tensor:
        return F.linear(x_TC * scale_T1, fp8.unpacked(bytes_NC, scale_N1, None, torch.float64), bias_N)

    def unrounded(parts: Any, factors: Any = ()) -> tuple[Tensor, Tensor]:
        scaled = [part_TN * scale_N1.T for part_TN, scale_N1 in zip(parts, factors, strict=True)] if factors else parts
        x_TC = torch.cat(tuple(scaled), 1)
        return x_TC, torch.ones(len(x_TC), 1, dtype=torch.float64)

    def rounded(cls: Any, weight_NC: Tensor, bias_N: Any = None) -> Any:
        values_NC, scale_N1 = round_rows([weight_NC.detach()])
        return cls(values_NC.view(torch.uint8), scale_N1, None, bias_N)

    with (
        mock.patch.object(fp8, "RESULTS", (torch.float64,)),
        mock.patch.object(fp8, "multiply", multiply),
        mock.patch.object(fp8, "round_rows", unrounded),
        mock.patch.object(products.FP8Linear, "rounded", classmethod(rounded)),
    ):
        yield


def exact_step_on_rank(case: ModelCase, plan_json: str, rows: Any, is_staged: bool = False) -> tuple[float, dict[str, Tensor]]:
    """Runs one step on this rank with these products; returns loss and gradients."""
    with in_fp64():
        found: Any = stage_step_on_rank(case, plan_json, rows) if is_staged else step_on_rank(case, plan_json, rows)
    return found[0], found[1]
