"""Mixtures of experts: their load-balancing loss over a whole optimizer step, and experts spread over ranks.

**Balance.** With R rows (tokens of the step, once for every layer that routes), E experts, f_e the routed rows of expert e
divided by R and P_e the mean over all rows of the router's probability of e, the loss of a step is (Switch Transformer, arXiv
2101.03961, equations 4 to 6, over all layers together as in transformers)

    coefficient * E * sum_e f_e P_e

It is not a sum of losses of chunks, because f_e counts the whole step. But f_e is a count and has no gradient, so once f is
known, the gradient of a row's logits depends on that row alone. With p the row's probabilities and
s_e = coefficient * E * f_e / R, it is

    d loss / d logit_e = p_e (s_e - sum_i p_i s_i)

An autograd node on the router's scores, which every row's experts read, adds this gradient in backward. It works with tiles,
recomputation, slices and any order of chunks. Every row of the step must be counted before the first backward, in forwards that
come first or in a pass of forwards without gradients. Dummy tokens are not counted and get no gradient. Probabilities are
computed in at least fp32 (transformers uses the dtype of the logits); a row is counted for the experts that the router chose.

**Spread experts.** Tokens travel to the ranks of their experts, weights do not. Rank r of a block of R ranks holds experts
r * E / R up to (r + 1) * E / R, whole, as its shard of one `DTensor`. So gradients, optimizer states, norms and checkpoints work
as for any sharded weight; only the gathers of FSDP2 leave experts out.

In a layer's forward every rank sends each of its tokens to the ranks of the experts that the token chose, once per expert. The
receiver runs its experts with the class's own forward, as if every row had one expert with weight 1. The results travel back,
and the token's rank weighs and adds them. Backward takes the same way back, so the gradients of an expert's weights are sums over
the tokens of all ranks of the block, without any reduction.

Every rank of the block must run the same layers forward and backward in the same order, however few tokens it has, as with any
sharded weights. A layer's forward waits once for the host, which must get the number of rows from each rank.

Shapes: T tokens of this rank (or of a tile), k experts for each, E experts, S = T * k rows to send, N rows that all ranks send
here, C hidden size, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hf_longctx.runtime.attention.sequence_parallel import all_to_all
from hf_longctx.runtime.core.binding import bound, put, replace_forward
from hf_longctx.runtime.process_groups import sum_over_ranks


class RouterBalance:
    """Balances the experts of one model, bound to its routers, which return logits [T, E], scores [T, k], indices [T, k].

    num_experts, num_chosen: E and k, also on a stage without routers. In a step, forwards run inside `running(is_counted=True)`,
    then `settle` is called, then backwards run inside `running`; `forget` ends the step. Routers run unchanged outside of
    `running`, and with a `coefficient` of 0 unless `take` has set another. `unbind` restores them.
    """

    def __init__(
        self, routers: Sequence[nn.Module], num_experts: int, num_chosen: int, coefficient: float, device: torch.device
    ) -> None:
        self.num_experts, self.num_chosen, self.coefficient = num_experts, num_chosen, coefficient
        # rows routed to each expert, and sums of its probabilities; of this rank's rows until `settle`
        self._sums_2E = torch.zeros(2, num_experts, dtype=torch.float64, device=device)
        # rows of each expert in the settled step
        self._loads_E = self._sums_2E[0]
        self._slopes_E: Tensor | None = None
        # whether the running chunk is counted, and whether its backward adds the gradient of the balance
        self._is_counted = self._is_pushed = False
        self._undo = [put(router, "forward", bound(router, self._routing(router.forward))) for router in routers]

    def unbind(self) -> None:
        """Restores the routers' forwards; further calls have no effect."""
        while self._undo:
            self._undo.pop()()

    @property
    def is_settled(self) -> bool:
        """Whether the loads of the whole step are known or not needed."""
        return self._slopes_E is not None or not self.coefficient

    @contextmanager
    def running(self, is_dummy: bool, is_counted: bool = False) -> Iterator[None]:
        """Context around one forward or backward of a chunk. is_dummy: this rank's shard has only dummy tokens."""
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
        """Sums rows routed to each expert, and its probabilities, over the ranks of `group`; [2, E]. Collective over it."""
        return sum_over_ranks(self._sums_2E, group)

    def take(self, sums_2E: Tensor, coefficient: float | Tensor) -> Tensor:
        """Settles the balance with known sums; backwards add `coefficient` times its gradient. Returns the same as `settle`."""
        self._loads_E, probabilities_E = sums_2E
        num_rows = self._loads_E.sum().clamp(min=1) / self.num_chosen
        slopes_E = self.num_experts * self._loads_E / num_rows**2
        self._slopes_E = coefficient * slopes_E
        return (slopes_E * probabilities_E).sum()

    @property
    def load(self) -> Tensor:
        """Returns rows of the fullest expert divided by those of an even split, a scalar from 1 on. Call it after `settle`."""
        return self._loads_E.max() * self.num_experts / self._loads_E.sum().clamp(min=1)

    def forget(self) -> None:
        """Drops the counts, after a step or a broken step."""
        self._sums_2E, self._slopes_E = torch.zeros_like(self._sums_2E), None

    def slopes(self) -> Tensor:
        """Returns the derivative [E] of the step's loss with respect to each expert's probability. Call it after `settle`."""
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
    """Returns router probabilities [T, E] in at least fp32."""
    return torch.softmax(logits_TE, dim=-1, dtype=torch.promote_types(logits_TE.dtype, torch.float32))


class _Pushed(torch.autograd.Function):
    """Returns the scores unchanged; backward adds the gradient of the step's balance to that of the logits."""

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


# attributes of a module with spread experts: the group of their ranks, and what runs the experts of this rank
_GROUP, _RUN = "longctx_spread", "longctx_run"


def spread_experts(modules: Sequence[nn.Module], mesh: DeviceMesh, device: torch.device) -> None:
    """Deals the experts of each module to the ranks of `mesh`, in place; call it before `shard_model`, which skips them.

    modules: their parameters have one entry for each of `num_experts` experts; their forward takes hidden states [T, C], indices
    [T, k] and weights [T, k] of each token's experts. mesh: one dimension, the ranks of a block. Only this rank's experts move to
    `device`; the others are dropped. Raises ValueError if the ranks do not divide the experts.
    """
    for module in modules:
        num_experts, num_ranks = int(module.num_experts), mesh.size()  # type: ignore[arg-type]
        if num_experts % num_ranks:
            raise ValueError(f"{type(module).__name__} has {num_experts} experts, which {num_ranks} ranks do not divide evenly")
        for name, parameter in list(module.named_parameters(recurse=False)):
            first = mesh.get_local_rank() * (num_experts // num_ranks)
            own = parameter.detach()[first : first + num_experts // num_ranks].to(device, copy=True)
            dealt = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(dealt, requires_grad=parameter.requires_grad))
        # the class's own forward then runs on the experts of this rank
        module.num_experts = num_experts // num_ranks  # type: ignore[assignment]
        vars(module)[_GROUP], vars(module)[_RUN] = mesh.get_group(), module.forward
        put(module, "forward", bound(module, _spread_forward(module, num_experts, mesh.get_group())))


def spread_group(model: nn.Module) -> dist.ProcessGroup | None:
    """Returns the group of ranks over which `spread_experts` spread experts of `model`; None if it has none."""
    return next((vars(module)[_GROUP] for module in model.modules() if _GROUP in vars(module)), None)


def experts_forward(module: nn.Module) -> Callable[..., Any]:
    """Returns what runs the experts of this rank: the module's forward, unless its experts are spread."""
    run: Callable[..., Any] = vars(module).get(_RUN, module.forward)
    return run


def replace_experts_forward(module: nn.Module, function: Callable[..., Any]) -> Callable[[], None]:
    """Lets `function` run the experts of this rank until the returned function restores what did."""
    own = vars(module)
    if _RUN not in own:
        return replace_forward(module, function)
    before = own[_RUN]
    own[_RUN] = function
    return lambda: own.update({_RUN: before})


def first_expert(module: nn.Module) -> int:
    """Returns the number of this rank's first expert among those of the layer."""
    group = vars(module).get(_GROUP)
    return 0 if group is None else group.rank() * int(module.num_experts)  # type: ignore[arg-type]


def _spread_forward(module: nn.Module, num_experts: int, group: dist.ProcessGroup) -> Callable[..., Any]:
    num_ranks = group.size()

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        num_chosen, hidden_size = top_k_index.shape[-1], hidden_states.shape[-1]
        chosen_S = top_k_index.reshape(-1)
        order_S = torch.argsort(chosen_S, stable=True)
        sent_RE = torch.zeros(num_experts, dtype=torch.int64, device=chosen_S.device)
        sent_RE = sent_RE.scatter_add_(0, chosen_S, torch.ones_like(chosen_S)).view(num_ranks, -1)
        received_RE = _exchanged_counts(sent_RE, group)
        send_rows, receive_rows = torch.stack([sent_RE.sum(dim=1), received_RE.sum(dim=1)]).tolist()
        send_sizes, receive_sizes = ([rows * hidden_size for rows in each] for each in (send_rows, receive_rows))
        rows_SC = hidden_states[order_S // num_chosen]
        rows_NC = all_to_all(rows_SC.reshape(-1), send_sizes, receive_sizes, group).view(-1, hidden_size)
        results_NC = _run_own(module, rows_NC, received_RE, sum(receive_rows))
        results_SC = all_to_all(results_NC.reshape(-1), receive_sizes, send_sizes, group).view(-1, hidden_size)
        # back in the order of tokens and their choices
        results_TkC = results_SC[torch.argsort(order_S)].view(-1, num_chosen, hidden_size)
        return (results_TkC * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)

    return forward


def _exchanged_counts(sent_RE: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchanges counts of rows: returns those that each rank sends for each expert of this rank."""
    received_RE, sizes = torch.empty_like(sent_RE), [sent_RE.shape[1]] * len(sent_RE)
    dist.all_to_all_single(received_RE.view(-1), sent_RE.view(-1), sizes, sizes, group=group)
    return received_RE


def _run_own(module: nn.Module, rows_NC: Tensor, received_RE: Tensor, num_rows: int) -> Tensor:
    """Returns results [N, C] of this rank's experts for received rows, which are ordered by rank, then by expert."""
    num_ranks, num_own = received_RE.shape
    experts_N = torch.arange(num_own, device=rows_NC.device).repeat(num_ranks)
    experts_N = experts_N.repeat_interleave(received_RE.reshape(-1), output_size=num_rows)
    if not num_rows:
        # a row of zeros keeps the graph: backward must run both exchanges and give the weights a gradient of zeros
        rows_NC, experts_N = rows_NC.sum(dim=0, keepdim=True), experts_N.new_zeros(1)
    with _local_weights(module):
        results: Tensor = vars(module)[_RUN](rows_NC, experts_N.unsqueeze(-1), rows_NC.new_ones((len(experts_N), 1)))
    return results[:num_rows]


@contextmanager
def _local_weights(module: nn.Module) -> Iterator[None]:
    """Context in which the module's parameters are this rank's local shards; gradients reach the sharded parameters."""
    # declared by torch to hold parameters only, although its modules read any tensor from it
    weights: dict[str, Any] = module._parameters
    held = dict(weights)
    weights.update({name: weight.to_local() for name, weight in held.items()})
    try:
        yield
    finally:
        weights.update(held)
