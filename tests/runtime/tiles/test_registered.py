"""A FlashAttention that the user has activated in torch takes part if its numbers are right, and is refused by name if not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.measures.cudnn_plans import CudnnPlans
from helpers.measures.flash_packs import FlashPacks
from torch import Tensor
from torch.nn import attention

from hf_longctx.runtime.tiles import cuda, packs
from hf_longctx.runtime.tiles import packages as registered
from hf_longctx.runtime.tiles.plain import Scores, TileInputs, plain_backward, plain_forward
from hf_longctx.runtime.tiles.tile import BACKENDS, attention_backend, choose_backend

CPU, HOPPER = torch.device("cpu"), (9, 0)
Change = Callable[[Tensor], Tensor]


@dataclass
class Handle:
    """An activation, as an implementation gives it to torch."""

    library: torch.library.Library

    def remove(self) -> None:
        self.library._destroy()


def provider(change_dk: Change = lambda dk: dk, change_packs: Change = lambda dk: dk, what: str = "") -> Callable[[], Handle]:
    """Registers an implementation for the CPU, whose gradients of keys are changed, or which fails with the message `what`."""

    # torch leaves out arguments that have their default values
    def forward(
        q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, is_causal: bool = False, debug: bool = False, *, scale: float
    ) -> Any:
        if what:
            raise ValueError(what)
        out, lse = plain_forward(TileInputs(q[0], k[0], v[0], Scores(scale), is_causal))
        nothing = torch.empty(0)
        return out.unsqueeze(0), lse.unsqueeze(0), None, None, q.shape[2], k.shape[2], nothing, nothing, nothing

    def backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float) -> Any:
        tile = TileInputs(q[0], k[0], v[0], Scores(scale), rest[5])
        dq, dk, dv = plain_backward(gradient[0], tile, out[0], lse[0])
        return tuple(x.to(q.dtype).unsqueeze(0) for x in (dq, change_dk(dk), dv))

    def packed_backward(*arguments: Any, **keywords: Any) -> Any:
        dq, dk, dv = FlashPacks().backward(*arguments, **keywords)
        return dq, change_packs(dk), dv

    def activate() -> Handle:
        library = torch.library.Library("aten", "IMPL")
        library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
        library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
        library.impl("_flash_attention_forward", FlashPacks().forward, "CPU")
        library.impl("_flash_attention_backward", packed_backward, "CPU")
        return Handle(library)

    return activate


def cudnn_provider(change_dk: Change = lambda dk: dk) -> Callable[[], Handle]:
    """Registers cuDNN's attention for the CPU, as nvidia-cudnn-frontend's "CUDNN" does for CUDA: FlashAttention 2 stays."""

    def backward(*arguments: Any, **keywords: Any) -> Any:
        dq, dk, dv = CudnnPlans().backward(*arguments, **keywords)
        return dq, change_dk(dk), dv

    def activate() -> Handle:
        library = torch.library.Library("aten", "IMPL")
        library.impl("_scaled_dot_product_cudnn_attention", CudnnPlans().forward, "CPU")
        library.impl("_scaled_dot_product_cudnn_attention_backward", backward, "CPU")
        return Handle(library)

    return activate


@pytest.fixture(autouse=True)
def checks_run_on_the_cpu() -> Iterator[None]:
    known = dict(attention._registry._FLASH_ATTENTION_IMPLS)
    with patch.object(registered, "_CUDA", CPU), patch.object(cuda, "cudnn_version", lambda: 91600):
        yield
    attention.restore_flash_attention_impl(_raise_warn=False)
    attention._registry._FLASH_ATTENTION_IMPLS.clear()
    attention._registry._FLASH_ATTENTION_IMPLS.update(known)


def activate(name: str, how: Callable[[], Handle]) -> None:
    attention.register_flash_attention_impl(name, register_fn=how)
    attention.activate_flash_attention_impl(name)


def chosen(head_dim: int = 64) -> str:
    return choose_backend("cuda", HOPPER, torch.bfloat16, head_dim).name


def packs_are_taken() -> bool:
    with patch.object(packs, "device_capability", lambda device: HOPPER):
        return packs.takes_packs(torch.device("cuda"), torch.bfloat16, 64, is_capped=False)


def test_one_that_is_right_computes_what_cudnn_would() -> None:
    assert chosen() == "cudnn" and registered.active_flash() == ""
    activate("Right", provider())
    assert (chosen(), registered.active_flash()) == ("flash_attention_2", "Right")
    assert packs_are_taken()
    attention.restore_flash_attention_impl()
    assert chosen() == "cudnn"


def test_one_that_is_wrong_is_refused_by_its_name_until_the_user_takes_another() -> None:
    activate("Wrong", provider(change_dk=lambda dk: dk * 1.1))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'Wrong'.* differs from plain matrices by .*restore_flash_attention_impl\(\)"):
            chosen()
    activate("Right", provider())
    assert chosen() == "flash_attention_2"
    # registered once more under its name
    activate("Right", provider(change_dk=lambda dk: dk * float("nan")))
    with pytest.raises(RuntimeError, match=r"'Right'.* differs from plain matrices by nan"):
        chosen()
    attention.restore_flash_attention_impl()
    assert chosen() == "cudnn"


def test_one_that_fails_is_refused_with_its_message() -> None:
    activate("FA4", provider(what="too many values to unpack (expected 2)"))
    with pytest.raises(RuntimeError, match=r"'FA4'.* fails with ValueError: too many values to unpack"):
        chosen()
    # other rows do not ask
    assert attention_backend(CPU, torch.bfloat16, 64) == "cpu_flash"
    assert choose_backend("cuda", HOPPER, torch.float32, 64).name == "plain"


def test_one_that_is_wrong_for_several_documents_is_refused_there() -> None:
    activate("Packs", provider(change_packs=lambda dk: dk.roll(1, 0)))
    assert chosen() == "flash_attention_2"
    with pytest.raises(RuntimeError, match=r"'Packs'.* in calls of several documents"):
        packs_are_taken()
    with patch.object(packs, "device_capability", lambda device: HOPPER):
        (problem,) = packs.attention_problems(torch.device("cuda"), torch.bfloat16, 64)
        assert problem.startswith("the attention 'Packs', which is active")
        assert packs.attention_problems(torch.device("cuda"), torch.float32, 64) == []
        activate("Right", provider())
        assert packs.attention_problems(torch.device("cuda"), torch.bfloat16, 64) == []


def test_one_of_cudnn_computes_its_tiles_and_takes_none_from_flash_attention() -> None:
    activate("CUDNN", cudnn_provider())
    assert (registered.active_attention(), registered.active_cudnn(), registered.active_flash()) == ("CUDNN", "CUDNN", "")
    assert chosen() == "cudnn"
    # heads that cuDNN does not take, and documents side by side, are computed by torch's own FlashAttention 2, unchecked
    assert chosen(256) == "flash_attention_2"
    assert packs_are_taken()
    with patch.object(packs, "device_capability", lambda device: HOPPER):
        assert packs.attention_problems(torch.device("cuda"), torch.bfloat16, 64) == []
    activate("Right", provider())
    assert (chosen(), registered.active_cudnn(), registered.active_flash()) == ("flash_attention_2", "", "Right")


def test_one_of_cudnn_that_is_wrong_is_refused_by_its_name() -> None:
    activate("CUDNN", cudnn_provider(change_dk=lambda dk: dk * 1.1))
    with pytest.raises(RuntimeError, match=r"'CUDNN'.* differs from plain matrices by .* in tiles of cuDNN"):
        chosen()
    assert chosen(256) == "flash_attention_2"
    with patch.object(packs, "device_capability", lambda device: HOPPER):
        (problem,) = packs.attention_problems(torch.device("cuda"), torch.bfloat16, 64)
        assert problem.startswith("the attention 'CUDNN', which is active")
        assert packs.attention_problems(torch.device("cuda"), torch.bfloat16, 256) == []
    # registered once more under its name
    activate("CUDNN", cudnn_provider())
    assert chosen() == "cudnn"


def test_verdicts_are_made_once_for_a_head_size() -> None:
    calls = []
    activate("Right", provider(change_dk=lambda dk: (calls.append(dk.shape[-1]), dk)[1]))
    for head_dim in (64, 64, 128, 64):
        chosen(head_dim)
    assert set(calls) == {64, 128} and calls.count(64) == calls.count(128)
    assert next(row for row in BACKENDS if row.plans).name == "cudnn"
