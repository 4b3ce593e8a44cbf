"""Backends from packages: a correct one is used, a wrong one is left out by name, and calls fit the packages' signatures.

No package is installed here: stand-ins have the signatures of flash-attn 2.8 and flash-attn-4 4.0 and compute by plain matrices.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hf_longctx.runtime.tiles import cuda
from hf_longctx.runtime.tiles.packages import FLASH_2, FLASH_4, PackageTiles
from hf_longctx.runtime.tiles.plain import Scores, TileInputs, plain_backward, plain_forward
from hf_longctx.runtime.tiles.tile import choose_backend

CPU = torch.device("cpu")
HOPPER, AMPERE = (9, 0), (8, 0)


def right_forward(tile: TileInputs) -> tuple[Tensor, Tensor]:
    return plain_forward(tile)


def right_backward(gradient: Tensor, tile: TileInputs, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.to(tile.q.dtype) for x in plain_backward(gradient, tile, out, lse))


def uncapped(tile: TileInputs) -> TileInputs:
    return replace(tile, scores=replace(tile.scores, softcap=0.0))


def forward_without_cap(tile: TileInputs) -> tuple[Tensor, Tensor]:
    return right_forward(uncapped(tile))


def backward_without_cap(gradient: Tensor, tile: TileInputs, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    return right_backward(gradient, uncapped(tile), out, lse)


def backward_of_own_output(gradient: Tensor, tile: TileInputs, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    return right_backward(gradient, tile, *right_forward(tile))


def other_lse(tile: TileInputs) -> tuple[Tensor, Tensor]:
    out, lse = right_forward(tile)
    return out, lse / torch.log(torch.tensor(2.0))


def swapped(*arguments: Any) -> tuple[Tensor, ...]:
    dq, dk, dv = right_backward(*arguments)
    return dq, dv, dk


def without_mask(tile: TileInputs) -> tuple[Tensor, Tensor]:
    return right_forward(replace(tile, causal=False))


def tokens_outermost(tile: TileInputs) -> tuple[Tensor, Tensor]:
    out, lse = right_forward(tile)
    return out.transpose(0, 1), lse


def not_a_number(tile: TileInputs) -> tuple[Tensor, Tensor]:
    out, lse = right_forward(tile)
    return out, lse.masked_fill(lse > 1e9, 0.0).index_fill(1, torch.tensor([0]), float("nan"))


def failing(*arguments: Any) -> Any:
    raise TypeError("unexpected keyword argument 'softcap'")


WRONG: dict[str, tuple[Any, Any, str]] = {
    "softcap ignored forward": (forward_without_cap, right_backward, "differs from plain matrices by"),
    "softcap ignored backward": (right_forward, backward_without_cap, "differs from plain matrices by"),
    "mask ignored": (without_mask, right_backward, "differs from plain matrices by"),
    "merged output and LSE ignored": (right_forward, backward_of_own_output, "differs from plain matrices by"),
    "LSE in base 2": (other_lse, right_backward, "differs from plain matrices by"),
    "gradients of keys and values swapped": (right_forward, swapped, "differs from plain matrices by"),
    "not a number": (not_a_number, right_backward, "differs from plain matrices by nan"),
    "tokens outermost": (tokens_outermost, right_backward, "has shape"),
    "another signature": (failing, right_backward, "TypeError: unexpected keyword argument 'softcap'"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_right_package_passes(dtype: torch.dtype, head_dim: int, caplog: Any) -> None:
    assert PackageTiles("stand-in", AMPERE, right_forward, right_backward).is_right(CPU, dtype, head_dim)
    assert not caplog.records


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_package_is_left_out_and_named(name: str, caplog: Any) -> None:
    forward, backward, message = WRONG[name]
    with caplog.at_level(logging.WARNING):
        assert not PackageTiles("stand-in", AMPERE, forward, backward).is_right(CPU, torch.bfloat16, 64)
    (record,) = caplog.records
    assert "attention of package stand-in is not used for heads of 64 in torch.bfloat16" in record.getMessage()
    assert message in record.getMessage()


def test_a_package_is_checked_once_and_used_for_what_it_may_take() -> None:
    checks: list[tuple[Any, ...]] = []

    def is_right(self: PackageTiles, *how: Any) -> bool:
        checks.append(how)
        return True

    package = PackageTiles("stand-in", HOPPER, right_forward, right_backward)
    with patch.object(PackageTiles, "is_installed", True), patch.object(PackageTiles, "is_right", is_right):
        assert all(package.takes("cuda", HOPPER, torch.bfloat16, 128) for _ in range(3))
        assert len(checks) == 1
        assert not package.takes("cuda", AMPERE, torch.bfloat16, 128)
        assert not package.takes("cpu", HOPPER, torch.bfloat16, 128)
        assert not package.takes("cuda", HOPPER, torch.float32, 128)
        assert not package.takes("cuda", HOPPER, torch.bfloat16, 60)
        assert len(checks) == 1
    assert not PackageTiles("stand-in", HOPPER, right_forward, right_backward).takes("cuda", HOPPER, torch.bfloat16, 128)


def test_packages_compute_capped_scores_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(is_capped: bool) -> str:
        return choose_backend("cuda", HOPPER, torch.bfloat16, 128, is_capped=is_capped).name

    monkeypatch.setattr(cuda, "cudnn_version", lambda: 91600)
    assert (chosen(True), chosen(False)) == ("plain", "cudnn")
    key = (HOPPER, torch.bfloat16, 128, torch.are_deterministic_algorithms_enabled())
    with patch.object(PackageTiles, "is_installed", True):
        for verdicts, expected in (((True, True), "flash_attn_4"), ((False, True), "flash_attn_2"), ((False, False), "plain")):
            known = [patch.dict(x.verdicts, {key: is_right}) for x, is_right in zip((FLASH_4, FLASH_2), verdicts, strict=True)]
            with known[0], known[1]:
                assert (chosen(True), chosen(False)) == (expected, "cudnn")


def heads_first(x_1THD: Tensor) -> Tensor:
    assert x_1THD.shape[0] == 1 and x_1THD.stride(-1) == 1
    return x_1THD.squeeze(0).transpose(0, 1)


def tokens_first(x_HTD: Tensor) -> Tensor:
    return x_HTD.transpose(0, 1).unsqueeze(0)


def flash_2_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert (dropout_p, window_size_left, window_size_right, alibi_slopes, return_softmax) == (0.0, -1, -1, None, False)
    out, lse = plain_forward(TileInputs(*map(heads_first, (q, k, v)), Scores(softmax_scale, softcap), causal))
    return tokens_first(out), lse.unsqueeze(0), torch.empty(0), torch.empty(2)


def flash_2_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert (dropout_p, window_size_left, window_size_right, alibi_slopes, deterministic) == (0.0, -1, -1, None, False)
    tile = TileInputs(*map(heads_first, (q, k, v)), Scores(softmax_scale, softcap), causal)
    found = plain_backward(heads_first(dout), tile, heads_first(out), softmax_lse.squeeze(0))
    for target, gradient in zip((dq, dk, dv), found, strict=True):
        assert target.is_contiguous() and softmax_lse.is_contiguous()
        target.copy_(tokens_first(gradient))
    return torch.empty(0)


def flash_4_forward(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, *, softmax_scale: float | None = None, causal: bool = False,
    softcap: float | None = None, return_lse: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    assert return_lse and softmax_scale is not None
    out, lse = plain_forward(TileInputs(*map(heads_first, (q, k, v)), Scores(softmax_scale, softcap or 0.0), causal))
    return tokens_first(out), lse.unsqueeze(0), None, None, None


def flash_4_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float | None = None,
    causal: bool = False, softcap: float = 0.0, *, deterministic: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert softmax_scale is not None and not deterministic and lse.is_contiguous()
    tile = TileInputs(*map(heads_first, (q, k, v)), Scores(softmax_scale, softcap), causal)
    found = plain_backward(heads_first(dout), tile, heads_first(out), lse.squeeze(0))
    return tuple(tokens_first(x.to(q.dtype)) for x in found)


MODULES = {
    "flash_attn.flash_attn_interface": {"_flash_attn_forward": flash_2_forward, "_flash_attn_backward": flash_2_backward},
    "flash_attn.cute.interface": {"_flash_attn_fwd": flash_4_forward, "_flash_attn_bwd": flash_4_backward},
}


@pytest.mark.parametrize("package", [FLASH_2, FLASH_4], ids=lambda package: package.name)
def test_packages_are_called_as_they_declare_their_functions(package: PackageTiles, caplog: Any) -> None:
    modules = {name: ModuleType(name) for name in ("flash_attn", "flash_attn.cute", *MODULES)}
    for name, functions in MODULES.items():
        vars(modules[name]).update(functions)
    with patch.dict(sys.modules, modules):
        assert package.is_right(CPU, torch.bfloat16, 64), caplog.text
