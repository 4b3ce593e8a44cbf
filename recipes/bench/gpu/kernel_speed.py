"""Speed of every kernel, against its plain-torch reference and against copying the same number of bytes.

    python recipes/bench/gpu/kernel_speed.py [--tokens 32768] [--degree 8] [--heads 32] [--kv-heads 8] [--head-dim 128]

"MB moved" is what an operation must read and write at least. "of copy" is its bandwidth as a share of that of `Tensor.copy_` on
as many bytes. On CUDA the Triton kernel and the reference are timed; without CUDA only the reference. A kernel's result is
compared with the reference before it is timed. Times are medians of the repetitions.

A second table has the microseconds that the host takes for one call on a few tokens: launched directly, as outside of graphs, and
by torch's dispatcher. Without CUDA, the reference takes the place of the launch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hf_longctx.kernels import merge_attention, reference, sequence_layout
from hf_longctx.recipes.bench.gpu.timing import median_s

REPETITIONS, HOST_REPETITIONS = 20, 200
# largest difference allowed, relative to the largest value: one rounding step of bf16
TOLERANCE = 2**-7


@dataclass(frozen=True, slots=True)
class Case:
    """One operation: the kernel's launcher, its reference, their arguments, and the bytes that must move."""

    name: str
    launch: Callable[..., Any]
    reference: Callable[..., Any]
    arguments: tuple[Any, ...]
    num_bytes: int


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors of nested arguments or results, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_of(item)] if isinstance(value, list | tuple) else []


def bytes_of(*values: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(values))


def cases(options: argparse.Namespace, device: torch.device) -> list[Case]:
    """All operations, at the sizes that one rank has in a group of `degree` ranks that share `tokens` tokens."""
    num_heads, num_kv, head_dim, degree = options.heads, options.kv_heads, options.head_dim, options.degree
    own = options.tokens // degree
    q = torch.randn(own, num_heads, head_dim, device=device, dtype=torch.bfloat16).transpose(0, 1)
    k, v = torch.randn(2, own, num_kv, head_dim, device=device, dtype=torch.bfloat16).transpose(1, 2)
    lse, other_lse = torch.randn(2, num_heads, own, device=device)
    partial_results = (q.float().contiguous(), lse, q.flip(1).contiguous(), other_lse)
    q_bounds, kv_ranges = head_tables(num_heads, num_kv, degree)
    num_q, num_read = q_bounds[1], kv_ranges[1]
    tokens = [own] * degree
    sent = reference.scatter_heads(q, k, v, q_bounds, kv_ranges)
    rows = [num_q, num_read, num_read]
    received = torch.randn(sum(rows) * own * degree * head_dim, device=device, dtype=torch.bfloat16)
    parts = reference.join_blocks(received, tokens, rows, head_dim)
    shares = [stop - start for start, stop in pairwise(q_bounds)]
    back = torch.randn(own * num_heads * head_dim, device=device, dtype=torch.bfloat16)
    whole = reference.join_blocks(back, shares, [own], head_dim)
    found = [
        ("accumulate_attention_", partial_results, bytes_of(partial_results, partial_results[:2])),
        ("scatter_heads", (q, k, v, q_bounds, kv_ranges, []), bytes_of(q, k, v, sent)),
        ("sum_heads", (sent, q_bounds, kv_ranges, [], num_kv, own, head_dim), bytes_of(q, k, v, sent)),
        ("join_blocks (tokens)", (received, tokens, rows, head_dim), 2 * bytes_of(received)),
        ("split_blocks (tokens)", (parts, tokens), 2 * bytes_of(received)),
        ("join_blocks (heads)", (back, shares, [own], head_dim), 2 * bytes_of(back)),
        ("split_blocks (heads)", (whole, shares), 2 * bytes_of(back)),
    ]
    return [Case(name, *functions_of(name), arguments, num_bytes) for name, arguments, num_bytes in found]


def head_tables(num_heads: int, num_kv: int, degree: int) -> tuple[list[int], list[int]]:
    """Divides query heads over ranks as evenly as possible; returns their bounds, and the KV heads that each rank reads."""
    q_bounds = [rank * num_heads // degree for rank in range(degree + 1)]
    per_kv = num_heads // num_kv
    kv_ranges = [bound for rank in range(degree) for bound in (q_bounds[rank] // per_kv, -(-q_bounds[rank + 1] // per_kv))]
    return q_bounds, kv_ranges


def functions_of(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Looks up (launcher of the kernel, reference) of an operation."""
    launchers: dict[str, Callable[..., Any]] = {
        "accumulate_attention_": merge_attention.launch_accumulate,
        "scatter_heads": sequence_layout.launch_scatter_heads,
        "sum_heads": sequence_layout.launch_sum_heads,
        "join_blocks": sequence_layout.launch_join_blocks,
        "split_blocks": sequence_layout.launch_split_blocks,
    }
    operation = name.split()[0]
    return launchers[operation], getattr(reference, operation)


def copy_s(num_bytes: int, device: torch.device) -> float:
    """Seconds of a copy that moves `num_bytes` in all: half of them read, half of them written."""
    source = torch.zeros(num_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return median_s(lambda: target.copy_(source), device, REPETITIONS)


def largest_difference(case: Case) -> float:
    """Largest difference between kernel and reference, relative to the largest value of each result.

    Both run on copies of the arguments, because some operations work in place.
    """
    results = []
    for function in (case.launch, case.reference):
        arguments = tuple(value.clone() if isinstance(value, Tensor) else value for value in case.arguments)
        returned = function(*arguments)
        results.append(tensors_of(arguments[:2] if returned is None else returned))
    pairs = [(one.double(), other.double()) for one, other in zip(*results, strict=True)]
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def row(case: Case, seconds: float, copied_s: float, variant: str) -> str:
    bandwidth = case.num_bytes / seconds / 1e9
    megabytes = case.num_bytes / 1e6
    return f"{case.name:26s} {variant:10s} {megabytes:9.1f} {seconds * 1e6:10.1f} {bandwidth:9.1f} {copied_s / seconds:8.0%}"


def operator_of(name: str) -> Callable[..., Any]:
    """The operator that torch's dispatcher knows for an operation."""
    operator: Callable[..., Any] = getattr(torch.ops.hf_longctx, name.split()[0])
    return operator


def host_us(call: Callable[[], Any], repetitions: int = HOST_REPETITIONS) -> float:
    """Microseconds of the host per call, the device's own time left out."""
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(repetitions):
        call()
    seconds = time.perf_counter() - start_s
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return seconds / repetitions * 1e6


def host_rows(options: argparse.Namespace, device: torch.device) -> list[tuple[str, float, float]]:
    """(operation, microseconds of a direct call, microseconds through the dispatcher) for 16 tokens per rank."""
    few = argparse.Namespace(**{**vars(options), "tokens": 16 * options.degree})
    found = []
    for case in cases(few, device):
        direct = case.launch if device.type == "cuda" else case.reference
        times = [host_us(partial(call, *case.arguments)) for call in (direct, operator_of(case.name))]
        found.append((case.name, times[0], times[1]))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table; fails if a kernel and its reference disagree."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of the whole group (default: 32768)")
    parser.add_argument("--degree", type=int, default=8, help="ranks of the group (default: 8)")
    parser.add_argument("--heads", type=int, default=32, help="query heads (default: 32)")
    parser.add_argument("--kv-heads", type=int, default=8, help="key and value heads (default: 8)")
    parser.add_argument("--head-dim", type=int, default=128, help="size of a head (default: 128)")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}, bf16, {options.tokens} tokens on {options.degree} ranks, {options.heads} query and "
        f"{options.kv_heads} KV heads of {options.head_dim}"
    )
    if device.type == "cpu":
        print(f"No CUDA device: only the plain-torch references run, with {torch.get_num_threads()} threads; no kernel is timed.")
    print(f"{'operation':26s} {'variant':10s} {'MB moved':>9s} {'us':>10s} {'GB/s':>9s} {'of copy':>8s}")
    for case in cases(options, device):
        copied_s = copy_s(case.num_bytes, device)
        if device.type == "cuda":
            difference = largest_difference(case)
            if not difference <= TOLERANCE:
                raise SystemExit(
                    f"{case.name}: kernel and reference differ by {difference:.1e} of the largest value, above {TOLERANCE:.1e}"
                )
            print(row(case, median_s(lambda: case.launch(*case.arguments), device, REPETITIONS), copied_s, "triton"))  # noqa: B023
        print(row(case, median_s(lambda: case.reference(*case.arguments), device, REPETITIONS), copied_s, "reference"))  # noqa: B023
    print(f"\n{'host us per call':26s} {'direct':>10s} {'dispatcher':>10s}")
    for name, direct_us, dispatched_us in host_rows(options, device):
        print(f"{name:26s} {direct_us:10.1f} {dispatched_us:10.1f}")


if __name__ == "__main__":
    main()
