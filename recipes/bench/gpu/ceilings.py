"""The most that one device can do: matrix products, copies, pinning, attention. Section A of `matrix.py`, or run on its own.

    python recipes/bench/gpu/ceilings.py [--model llama-3.1-8b] [--toy] [--json FILE]

Prints medians of repetitions in bf16, timed by the device's clock (on the CPU: fp32, wall clock). Attention counts causal pairs
only: with S tokens and a = heads x head size, 2 a S^2 operations forward and 2.5 times as many backward, whatever a kernel
really does. A row that fails says why, and the others still run. Without CUDA, the rows that need it are named and left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_longctx.kernels.merge_attention import accumulate_attention_
from hf_longctx.plan.cost.catalog import named_model
from hf_longctx.plan.model.model_spec import ModelSpec
from hf_longctx.recipes.bench.gpu.cases import TOY
from hf_longctx.recipes.bench.gpu.rows import append_row
from hf_longctx.recipes.bench.gpu.timing import median_s, wall_s
from hf_longctx.recipes.bench.one_document import attention_kernel
from hf_longctx.runtime.activations.host_tier import HostTier
from hf_longctx.runtime.core.fp8 import input_gradient, multiply, rows_in_fp8
from hf_longctx.runtime.core.products import FP8Linear
from hf_longctx.runtime.tiles.cuda import cudnn_backward, cudnn_forward
from hf_longctx.runtime.tiles.packs import PackBounds, PackInputs, pack_backward, pack_forward
from hf_longctx.runtime.tiles.plain import Scores, TileInputs
from hf_longctx.runtime.tiles.tile import BACKENDS, tile_backward, tile_forward


@dataclass(frozen=True)
class Ceiling:
    """One line of the table."""

    name: str
    value: float
    unit: str
    note: str = ""

    def __str__(self) -> str:
        return f"A  {self.name:52s} {self.value:12.4g} {self.unit:10s} {self.note}"


@dataclass(frozen=True)
class Sizes:
    """Sizes to measure.

    product_tokens: rows of a matrix product. lengths: tokens of attention. slice_tokens: tokens of a slice. copy_bytes,
    pin_bytes: bytes to copy and to pin. repetitions: timed calls per row.
    """

    spec: ModelSpec
    product_tokens: int
    lengths: tuple[int, ...]
    slice_tokens: tuple[int, ...]
    copy_bytes: int
    pin_bytes: int
    repetitions: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table of this machine's first device."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="llama-3.1-8b", help="a named shape of the catalogue (default: llama-3.1-8b)")
    parser.add_argument("--toy", action="store_true", help="measure sizes small enough for a CPU")
    parser.add_argument("--pin-gib", type=float, default=8.0, help="GiB of host memory to pin, at least 2 (default: 8)")
    parser.add_argument("--json", type=Path, default=None, help="also append each row to this file, as soon as it is done")
    options = parser.parse_args(arguments)
    ceilings(sizes_of(options.model, options.toy, options.pin_gib), first_device(), file=options.json)


def sizes_of(model: str, is_toy: bool, pin_gib: float = 8.0) -> Sizes:
    if is_toy:
        toy = replace(TOY, bytes_per_element=dtype_of(first_device()).itemsize)
        return Sizes(toy, 64, (64, 96), (32,), 1 << 16, 1 << 17, 2)
    pin_bytes = int(pin_gib * 2**30)
    # copies go both ways at once, each to a part of what is pinned
    copy_bytes = min(1 << 30, pin_bytes // 2)
    return Sizes(named_model(model), 16384, (8192, 32768, 131072), (4096, 8192, 16384), copy_bytes, pin_bytes, 7)


def first_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ceilings(sizes: Sizes, device: torch.device, deadline_s: float = float("inf"), file: Path | None = None) -> list[Ceiling]:
    """Prints and returns all rows; starts no group of rows after `deadline_s` (on the clock of `time.monotonic`).

    file: gets each row as soon as it is done.
    """
    groups: list[tuple[str, Callable[[Sizes, torch.device], Iterator[Ceiling]], bool]] = [
        ("matrix products", products, False),
        ("matrix products in fp8", fp8_products, False),
        ("copies inside the device", device_copies, False),
        ("pinning and copies to the host", host_copies, True),
        ("attention", attention, False),
        ("short documents", short_documents, True),
        ("slices in two pieces", two_pieces, False),
    ]
    found: list[Ceiling] = []
    for name, measure, needs_cuda in groups:
        if needs_cuda and device.type != "cuda":
            print(f"A  skipped: {name} need CUDA", flush=True)
        elif time.monotonic() > deadline_s:
            print(f"A  skipped: {name}, the section's time is up", flush=True)
        else:
            for row in _rows(name, measure(sizes, device)):
                print(row, flush=True)
                found.append(row)
                if file is not None:
                    append_row(file, asdict(row))
    return found


def _rows(name: str, rows: Iterator[Ceiling]) -> Iterator[Ceiling]:
    """Yields the rows up to one that fails, which becomes a row with the reason."""
    try:
        yield from rows
    # a failure in one group must not stop the others
    except Exception as failure:
        yield Ceiling(name, float("nan"), "failed", f"{type(failure).__name__}: {failure}".split("\n")[0])


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def products(sizes: Sizes, device: torch.device) -> Iterator[Ceiling]:
    """Rates of every matrix product of a layer and of the output head, forward and for the weight's gradient."""
    spec, tokens = sizes.spec, sizes.product_tokens
    inner, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = {
        "queries": (inner, spec.hidden_size),
        "keys, values": (kv, spec.hidden_size),
        "attention output": (spec.hidden_size, inner),
        "gate, up": (spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
        "output head": (spec.vocab_size, spec.hidden_size),
    }
    for name, (rows, columns) in shapes.items():
        x = torch.randn(tokens, columns, device=device, dtype=dtype_of(device))
        weight, gradient = x.new_empty(rows, columns).normal_(), x.new_empty(tokens, rows).normal_()
        operations = 2 * tokens * rows * columns
        calls = {"forward": partial(F.linear, x, weight), "weight gradient": partial(torch.mm, gradient.t(), x)}
        for way, call in calls.items():
            rate = operations / median_s(call, device, sizes.repetitions) / 1e12
            yield Ceiling(f"product {name}, {way}", rate, "TFLOP/s", f"{tokens} x {columns} x {rows}")


def fp8_products(sizes: Sizes, device: torch.device) -> Iterator[Ceiling]:
    """Rates of products with frozen matrices in fp8, forward and for the input's gradient, and how they compare with bf16.

    The first ratio, of operators alone, is `fp8_ratio` of a hardware profile; the second includes rounding and, in backward, the
    bytes in the other order; the third is that of operators for one token less.
    """
    spec, tokens = sizes.spec, sizes.product_tokens
    shapes = {"gate, up": (spec.intermediate_size, spec.hidden_size), "down": (spec.hidden_size, spec.intermediate_size)}
    for name, (rows, columns) in shapes.items():
        x = torch.randn(tokens, columns, device=device).bfloat16()
        weight, gradient = x.new_empty(rows, columns).normal_(), x.new_empty(tokens, rows).normal_()
        linear, turned = FP8Linear.rounded(weight), FP8Linear.rounded(weight.T.contiguous())
        given = {"forward": (x, linear), "input gradient": (gradient, turned)}
        plain = {"forward": partial(F.linear, x, weight), "input gradient": partial(torch.mm, gradient, weight)}
        whole = {
            "forward": partial(linear.forward, x),
            "input gradient": partial(input_gradient, [gradient], [linear.weight], [linear.scale]),
        }
        for way, (factor, matrix) in given.items():
            values, scale = rows_in_fp8(factor)
            calls = [
                partial(multiply, values[:count], scale[:count], matrix.weight, matrix.scale, x.dtype)
                for count in (tokens, tokens - 1)
            ]
            with torch.no_grad():
                own_s, odd_s, whole_s, plain_s = (
                    median_s(call, device, sizes.repetitions) for call in (*calls, whole[way], plain[way])
                )
            note = f"{plain_s / own_s:.2f}, {plain_s / whole_s:.2f} and {plain_s / odd_s:.2f} times the rate in bf16"
            yield Ceiling(f"product in fp8 {name}, {way}", 2 * tokens * rows * columns / own_s / 1e12, "TFLOP/s", note)


def device_copies(sizes: Sizes, device: torch.device) -> Iterator[Ceiling]:
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), device, sizes.repetitions)
    yield Ceiling("copy inside the device", 2 * sizes.copy_bytes / copy_s / 1e9, "GB/s", "read and written")


def host_copies(sizes: Sizes, device: torch.device) -> Iterator[Ceiling]:
    """Rates of pinning by torch and as our slab, of copies each way, both ways at once, and during a matrix product."""
    num_bytes, pin_gib = sizes.copy_bytes, sizes.pin_bytes / 2**30
    homes: dict[str, Tensor] = {}

    def pin_by_torch() -> None:
        homes["torch's pinned memory"] = torch.empty(sizes.pin_bytes, dtype=torch.uint8, pin_memory=True)

    def pin_slab() -> None:
        tiers.append(HostTier.on(device, sizes.pin_bytes))

    tiers: list[HostTier] = []
    yield Ceiling(f"pinning {pin_gib:g} GiB by torch", wall_s(pin_by_torch), "s")
    yield Ceiling(f"pinning {pin_gib:g} GiB as our slab", wall_s(pin_slab), "s", f"pinned: {tiers[0].slab.is_pinned}")
    homes["our slab"] = tiers[0].slab.memory
    on_device = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    for name, memory in homes.items():
        home = memory[:num_bytes]
        out_s = median_s(lambda home=home: home.copy_(on_device, non_blocking=True), device, sizes.repetitions)
        back_s = median_s(lambda home=home: on_device.copy_(home, non_blocking=True), device, sizes.repetitions)
        yield Ceiling(f"to the host, {name}", num_bytes / out_s / 1e9, "GB/s")
        yield Ceiling(f"to the device, {name}", num_bytes / back_s / 1e9, "GB/s")
    yield from _beside(homes["our slab"], on_device, sizes, device)


def _beside(slab: Tensor, on_device: Tensor, sizes: Sizes, device: torch.device) -> Iterator[Ceiling]:
    """Measures copies both ways at once, and copies to the host during matrix products that take about as long."""
    num_bytes, other = sizes.copy_bytes, torch.empty_like(on_device)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    out_home, back_home = slab[:num_bytes], slab[num_bytes : 2 * num_bytes]

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            out_home.copy_(on_device, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            other.copy_(back_home, non_blocking=True)

    def out_only() -> None:
        with torch.cuda.stream(streams[0]):
            out_home.copy_(on_device, non_blocking=True)

    def repeated(function: Callable[[], None]) -> float:
        return median(wall_s(function) for _ in range(sizes.repetitions))

    both_s, out_s = repeated(both), repeated(out_only)
    yield Ceiling("both ways at once, our slab", 2 * num_bytes / both_s / 1e9, "GB/s", "sum of both ways")
    side = min(8192, sizes.product_tokens)
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    product_s = median_s(lambda: a @ a, device, sizes.repetitions)
    count = max(1, round(out_s / product_s))

    def compute() -> None:
        for _ in range(count):
            torch.mm(a, a)

    def compute_and_copy() -> None:
        out_only()
        compute()

    alone_s, beside_s = repeated(compute), repeated(compute_and_copy)
    note = f"products alone {alone_s * 1e3:.1f} ms, copy alone {out_s * 1e3:.1f} ms, both {beside_s * 1e3:.1f} ms"
    yield Ceiling("products beside a copy to the host", beside_s / alone_s, "x as long", note)


def heads(spec: ModelSpec, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random gradient and queries [H, T, D], keys and values [G, T, D]."""
    sizes = (spec.num_heads, spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    generator = torch.Generator(device).manual_seed(0)
    gradient, q, k, v = (
        torch.randn(h, tokens, spec.head_dim, device=device, dtype=dtype_of(device), generator=generator) for h in sizes
    )
    return gradient, q, k, v


def attention(sizes: Sizes, device: torch.device) -> Iterator[Ceiling]:
    """Rates of every tile backend that runs on this device, and of torch's own choice, with the name of its kernel."""
    spec, scores = sizes.spec, Scores(sizes.spec.head_dim**-0.5)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    rows = [row.name for row in BACKENDS if row.takes(device.type, capability, dtype_of(device), spec.head_dim)]
    for tokens in sizes.lengths:
        gradient, q, k, v = heads(spec, tokens, device)
        operations = 2 * spec.num_heads * spec.head_dim * tokens**2
        for name in rows:
            # the plain backend holds all scores at once, so leave it out where they are large
            if name == "plain" and 8 * spec.num_heads * tokens**2 > sizes.copy_bytes:
                continue
            tile = TileInputs(q, k, v, scores, causal=True)
            out, lse = tile_forward(tile, name)
            forward_s = median_s(partial(tile_forward, tile, name), device, sizes.repetitions)
            backward = partial(tile_backward, gradient, tile, out, lse, name)
            backward_s = median_s(backward, device, sizes.repetitions)
            yield Ceiling(f"tile {name}, {tokens} tokens, forward", operations / forward_s / 1e12, "TFLOP/s")
            yield Ceiling(f"tile {name}, {tokens} tokens, backward", 2.5 * operations / backward_s / 1e12, "TFLOP/s")
        leaves = [x.unsqueeze(0).requires_grad_() for x in (q, k, v)]
        forward = partial(F.scaled_dot_product_attention, *leaves, is_causal=True, enable_gqa=True)
        output = forward()
        again = partial(torch.autograd.grad, output, leaves, gradient.unsqueeze(0), retain_graph=True)
        kernel = attention_kernel(forward, device)
        forward_s, backward_s = (median_s(call, device, sizes.repetitions) for call in (forward, again))
        yield Ceiling(f"torch's choice, {tokens} tokens, forward", operations / forward_s / 1e12, "TFLOP/s", kernel)
        yield Ceiling(f"torch's choice, {tokens} tokens, backward", 2.5 * operations / backward_s / 1e12, "TFLOP/s")


def short_documents(sizes: Sizes, device: torch.device) -> Iterator[Ceiling]:
    """Compares attention over short documents: all in one call of FlashAttention 2, against each in a call of cuDNN.

    Plans take the first way up to `PACKED_TOKENS` tokens. cuDNN makes a plan for each new length in its first call, and fills up
    lengths that 128 does not divide.
    """
    spec, total = sizes.spec, sizes.lengths[-1] // 4
    scale = spec.head_dim**-0.5
    made = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in heads(spec, total, device)]
    for length in sorted({max(2, each) for each in (total // 32, total // 16, total // 11 - 8, total // 8, total // 4)}):
        count = total // length
        gradient, q, k, v = (x[:, : count * length] for x in made)
        operations = 2 * spec.num_heads * spec.head_dim * count * length**2 / 1e12
        pack = PackInputs(q, k, v, PackBounds().on_device([length] * count, device), length, scale)
        whole = pack_forward(pack)
        documents = zip(*(x.split(length, 1) for x in (q, k, v)), strict=True)
        tiles = [TileInputs(*qkv, Scores(scale), causal=True) for qkv in documents]
        gradients = gradient.split(length, 1)
        first_s = wall_s(partial(cudnn_forward, tiles[0]))
        results = [cudnn_forward(tile) for tile in tiles]
        first_back_s = wall_s(partial(cudnn_backward, gradients[0], tiles[0], *results[0]))
        ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "one call": (partial(pack_forward, pack), partial(pack_backward, gradient, pack, *whole)),
            "cuDNN": (
                lambda tiles=tiles: [cudnn_forward(tile) for tile in tiles],
                lambda gradients=gradients, tiles=tiles, results=results: [
                    cudnn_backward(gradient, tile, *result)
                    for gradient, tile, result in zip(gradients, tiles, results, strict=True)
                ],
            ),
        }
        for name, (forward, backward) in ways.items():
            note = f"first calls {first_s:.3f} and {first_back_s:.3f} s" if name == "cuDNN" else ""
            place = f"{count} x {length} tokens, {name}"
            yield Ceiling(f"{place}, forward", operations / median_s(forward, device, sizes.repetitions), "TFLOP/s", note)
            yield Ceiling(f"{place}, backward", 2.5 * operations / median_s(backward, device, sizes.repetitions), "TFLOP/s")


def two_pieces(sizes: Sizes, device: torch.device) -> Iterator[Ceiling]:
    """Compares attention in slices with one causal tile over the whole document: time and error.

    Each slice is two tiles: one over the tokens before it, and a causal square over its own.
    """
    tokens = sizes.lengths[len(sizes.lengths) // 2]
    scores = Scores(sizes.spec.head_dim**-0.5)
    inputs = heads(sizes.spec, tokens, device)
    whole = partial(sliced, *inputs, scores, tokens)
    expected, whole_s = whole(), median_s(whole, device, sizes.repetitions)
    for slice_tokens in sizes.slice_tokens:
        call = partial(sliced, *inputs, scores, slice_tokens)
        found, call_s = call(), median_s(call, device, sizes.repetitions)
        errors = [
            float((f.float() - e.float()).abs().max() / e.float().abs().max()) for f, e in zip(found, expected, strict=True)
        ]
        note = "largest difference to one tile: output {:.1e}, dq {:.1e}, dk {:.1e}, dv {:.1e}".format(*errors)
        name = f"slices of {slice_tokens} of {tokens} tokens, forward + backward"
        yield Ceiling(name, call_s / whole_s, "x as long", note)


def sliced(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, scores: Scores, slice_tokens: int) -> tuple[Tensor, ...]:
    """Attention slice by slice, first all forwards, then all backwards; returns the output and the gradients of q, k and v.

    Gradients of keys and values are summed in fp32.
    """
    tokens = q.shape[1]
    bounds = [*range(0, tokens, slice_tokens), tokens]
    out, dq = torch.empty_like(q), torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    lses = []
    for start, stop in pairwise(bounds):
        rows = slice(start, stop)
        merged, lse = tile_forward(TileInputs(q[:, rows], k[:, rows], v[:, rows], scores, causal=True))
        if start:
            merged = merged.to(lse.dtype)
            front = TileInputs(q[:, rows], k[:, :start], v[:, :start], scores, causal=False)
            accumulate_attention_(merged, lse, *tile_forward(front))
        out[:, rows] = merged
        lses.append(lse)
    for (start, stop), lse in reversed(list(zip(pairwise(bounds), lses, strict=True))):
        rows = slice(start, stop)
        total = torch.zeros_like(q[:, rows], dtype=torch.float32)
        for keys, causal in ((slice(0, start), False), (rows, True)):
            if keys.start == keys.stop:
                continue
            tile = TileInputs(q[:, rows], k[:, keys], v[:, keys], scores, causal)
            tile_dq, tile_dk, tile_dv = tile_backward(gradient[:, rows], tile, out[:, rows], lse)
            total += tile_dq
            dk[:, keys] += tile_dk
            dv[:, keys] += tile_dv
        dq[:, rows] = total
    return out, dq, dk, dv


if __name__ == "__main__":
    main()
