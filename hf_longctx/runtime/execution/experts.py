"""The load-balancing loss of a mixture of experts over a whole optimizer step, and how it reaches the routers.

With R rows (tokens of the step, once for every layer that routes), E experts, f_e the routed rows of expert e divided by R and
P_e the mean over all rows of the router's probability of e, the loss of a step is (Switch Transformer, arXiv 2101.03961,
equations 4 to 6, over all layers together as in transformers)

    coefficient * E * sum_e f_e P_e

This loss is not a sum over tokens, because f_e counts the whole step; so it cannot be the sum of losses of single chunks. But f_e
is a count and has no gradient, so once f is known, the gradient of a row's logits depends on that row alone. With p the row's
probabilities and s_e = coefficient * E * f_e / R, it is

    d loss / d logit_e = p_e (s_e - sum_i p_i s_i)

An autograd node on the router's scores, which every row's experts read, adds this gradient in backward. It works with tiles,
recomputation, slices and any order of chunks. Every row of the step must have been counted before the first backward, in forwards
that come first or in a pass of forwards without gradients. Dummy tokens are not counted and get no gradient. Probabilities are
computed in at least fp32 (transformers uses the dtype of the logits); a row is counted for the experts that the router chose.

Shapes: T tokens of one call (all of a chunk's shard, or a tile of it), E experts, k of them for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_longctx.runtime.core.binding import bound, put
from hf_longctx.runtime.process_groups.pool import sum_over_ranks


class RouterBalance:
    """Balances the experts of one model, bound to its routers, which return logits [T, E], scores [T, k], indices [T, k].

    `num_experts`, `num_chosen`: E and k, also on a stage without routers. In a step, forwards run inside
    `running(is_counted=True)`, then `settle` is called, then backwards run inside `running`; `forget` ends the step. Outside
    `running`, and with `coefficient` 0 unless `take` has set another one, routers do what their class does. `unbind` restores the
    routers.
    """

    def __init__(
        self, routers: Sequence[nn.Module], num_experts: int, num_chosen: int, coefficient: float, device: torch.device
    ) -> None:
        self.num_experts, self.num_chosen, self.coefficient = num_experts, num_chosen, coefficient
        # number of rows routed to each expert, and the sum of its probabilities, over this rank's rows until they are settled
        self._sums_2E = torch.zeros(2, num_experts, dtype=torch.float64, device=device)
        # rows of each expert in the settled step
        self._loads_E = self._sums_2E[0]
        self._slopes_E: Tensor | None = None
        # whether the running chunk is counted, and whether its backward adds the gradient of the balance
        self._is_counted = self._is_pushed = False
        self._undo = [put(router, "forward", bound(router, self._routing(router.forward))) for router in routers]

    def unbind(self) -> None:
        """Gives the routers their own forwards back; may be called again without effect."""
        while self._undo:
            self._undo.pop()()

    @property
    def is_settled(self) -> bool:
        """Whether the loads of the whole step are known, or not needed."""
        return self._slopes_E is not None or not self.coefficient

    @contextmanager
    def running(self, is_dummy: bool, is_counted: bool = False) -> Iterator[None]:
        """Context around one forward or backward of a chunk; is_dummy: no token of this rank's shard is real."""
        self._is_counted = is_counted and not is_dummy
        # forwards may come before the loads are known
        self._is_pushed = not is_dummy and (self.coefficient != 0 or self._slopes_E is not None)
        try:
            yield
        finally:
            self._is_counted = self._is_pushed = False

    def settle(self, group: dist.ProcessGroup | None) -> Tensor:
        """Sums the counts over the ranks of `group` (None: this rank alone); returns E * sum_e f_e P_e, a scalar in fp64.

        Collective over `group`, before the first backward of any of its ranks.
        """
        return self.take(self.summed(group), self.coefficient)

    def summed(self, group: dist.ProcessGroup | None) -> Tensor:
        """[2, E]: rows routed to each expert, and sums of its probabilities, over the ranks of `group`. Collective over it."""
        return sum_over_ranks(self._sums_2E, group)

    def take(self, sums_2E: Tensor, coefficient: float | Tensor) -> Tensor:
        """Settles the balance by sums that are known; backwards add `coefficient` times its gradient. Returns as `settle`."""
        self._loads_E, probabilities_E = sums_2E
        num_rows = self._loads_E.sum().clamp(min=1) / self.num_chosen
        slopes_E = self.num_experts * self._loads_E / num_rows**2
        self._slopes_E = coefficient * slopes_E
        return (slopes_E * probabilities_E).sum()

    @property
    def load(self) -> Tensor:
        """Rows of the fullest expert divided by those of an even split, a scalar of at least 1; known after `settle`."""
        return self._loads_E.max() * self.num_experts / self._loads_E.sum().clamp(min=1)

    def forget(self) -> None:
        """Drops the counts, at the end of a step and before one that follows a broken step."""
        self._sums_2E, self._slopes_E = torch.zeros_like(self._sums_2E), None

    def slopes(self) -> Tensor:
        """[E] derivative of the step's loss by each expert's probability; known after `settle`."""
        if self._slopes_E is None:
            raise RuntimeError("a router's backward ran before the loads of the whole step were known; call settle() first")
        return self._slopes_E

    def _routing(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **keywords: Any) -> Any:
            logits_TE, scores_Tk, indices_Tk = run(*args, **keywords)
            if self._is_counted:
                self._count(logits_TE.detach(), indices_Tk)
            if self._is_pushed and scores_Tk.requires_grad:
                scores_Tk = _Pushed.apply(scores_Tk, logits_TE, self)
            return logits_TE, scores_Tk, indices_Tk

        return forward

    def _count(self, logits_TE: Tensor, indices_Tk: Tensor) -> None:
        chosen = indices_Tk.reshape(-1)
        self._sums_2E[0].scatter_add_(0, chosen, self._sums_2E.new_ones(()).expand_as(chosen))
        self._sums_2E[1] += _probabilities(logits_TE).sum(dim=0)


def _probabilities(logits_TE: Tensor) -> Tensor:
    """Router probabilities [T, E] in at least fp32."""
    return torch.softmax(logits_TE, dim=-1, dtype=torch.promote_types(logits_TE.dtype, torch.float32))


class _Pushed(torch.autograd.Function):
    """Passes the scores through; backward adds the gradient of the step's balance to that of the logits."""

    @staticmethod
    def forward(ctx: Any, scores_Tk: Tensor, logits_TE: Tensor, balance: RouterBalance) -> Tensor:
        ctx.save_for_backward(logits_TE)
        ctx.balance = balance
        return scores_Tk.view_as(scores_Tk)

    @staticmethod
    def backward(ctx: Any, gradient_Tk: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (logits_TE,) = ctx.saved_tensors
        p_TE = _probabilities(logits_TE)
        slopes_E = ctx.balance.slopes().to(p_TE.dtype)
        pushed_TE = p_TE * (slopes_E - (p_TE * slopes_E).sum(dim=-1, keepdim=True))
        return gradient_Tk, pushed_TE.to(logits_TE.dtype), None
