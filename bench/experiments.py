"""Owns the experiments of `bench fusion`: what each computes, in which variants, and the bytes and arithmetic of every kernel.

Does not own their Triton kernels (fusion_kernels) or the clock and the words about it (fusion).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import fusion_kernels as own
from bench.arithmetic import Ceilings
from bench.steps import Play, graph_of

EXPERIMENTS = ("chain", "rows", "gemm", "attention", "limits")
BF16 = torch.bfloat16
TOKENS, WIDTH = 32 * 4096, 16384
DROPOUT = 0.1
Make = Callable[[torch.device], Play]
Data = Callable[[torch.device], Sequence[Tensor]]


@dataclass(frozen=True)
class Variant:
    """One way to compute an experiment's result.

    Attributes:
        kernels: (bytes moved, operations of `tl.dot` or cuBLAS) of each launch.
        make: on a device, the call that computes it; each holds inputs of its own.
        host: whether the host launches each kernel; else a graph does.
        again: bytes read a second time, and those that an SM's blocks go through in between: more than its share of L2, and
            the second reading is from HBM.
    """

    name: str
    kernels: Sequence[tuple[int, int]]
    make: Make
    host: bool = True
    again: tuple[int, int] = (0, 0)

    def predicted_us(self, rates: Ceilings) -> float:
        """Bytes or arithmetic over their ceilings, kernel by kernel, and at least the host's launches."""
        device = sum(max(moved / rates.copy_gbps / 1e3, ops / rates.tflops / 1e6) for moved, ops in self.kernels)
        second, between = self.again
        device += second / rates.copy_gbps / 1e3 if between > rates.sm_l2_bytes else 0.0
        launch = rates.triton_us if self.name.startswith("Triton") else rates.torch_us
        return max(device, len(self.kernels) * launch if self.host else 0.0)


@dataclass(frozen=True)
class Experiment:
    """Variants that compute one thing; `gain` names the two whose ratio is the experiment's word, `why` what it teaches."""

    title: str
    variants: Sequence[Variant]
    gain: tuple[str, str]
    why: str


def chain(tokens: int, width: int, why: str, graph: bool = False) -> Experiment:
    """dropout(gelu(x + b)), training mode; `graph` plays it without the host."""
    n, moved = tokens * width, 4 * tokens * width
    data = _random((tokens, width), (width,))

    def eager(x: Tensor, b: Tensor) -> Tensor:
        return F.dropout(F.gelu(x + b, approximate="tanh"), DROPOUT, training=True)

    triton = partial(own.bias_gelu_dropout, p=DROPOUT, seed=0)
    variants = [
        Variant("eager", [(moved, 0), (moved, 0), (moved + n, 0)], _call(eager, data)),
        Variant("torch.compile", [(moved, 0)], _compiled(eager, data)),
        Variant("Triton", [(moved, 0)], _call(triton, _random((tokens, width), (width,), (tokens, width)))),
    ]
    if graph:
        variants = [replace(each, make=_as_graph(each.make), host=False) for each in (variants[0], variants[-1])]
    title = f"{'limit: ' if graph else ''}dropout(gelu(x + b)), {tokens} x {width}, {n * 2 / 1e6:,.4g} MB"
    return Experiment(title, variants, ("eager", "Triton"), why)


def rows(kind: int, width: int, values: int = 1 << 29) -> Experiment:
    """softmax, LayerNorm or RMSNorm with what reads its result, over rows of `width`."""
    count = max(1, values // width)
    moved, stats = 4 * count * width, 2 * count * width
    data, with_out = _random((count, width), (width,)), _random((count, width), (width,), (count, width))

    def unfused(x: Tensor, weight: Tensor) -> Tensor:
        if kind == own.SOFTMAX:
            e = torch.exp(x - x.amax(-1, keepdim=True))
            return e / e.sum(-1, keepdim=True)
        if kind == own.LAYER_NORM:
            x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(torch.mean(x * x, -1, keepdim=True) + 1e-6) * weight

    def library(x: Tensor, weight: Tensor) -> Tensor:
        if kind == own.SOFTMAX:
            return torch.softmax(x, -1)
        return F.layer_norm(x, (width,), weight, eps=1e-6) if kind == own.LAYER_NORM else F.rms_norm(x, (width,), weight, 1e-6)

    # amax, -, exp, sum, /; or mean, -, x*x, mean, +eps, rsqrt, *, *: the small ones move next to nothing.
    apart = [(stats, 0), (moved, 0), (moved, 0), (stats, 0), (moved, 0)]
    if kind != own.SOFTMAX:
        centre = [(stats, 0), (moved, 0)] if kind == own.LAYER_NORM else []
        apart = [*centre, (moved, 0), (stats, 0), (0, 0), (0, 0), (moved, 0), (moved, 0)]
    wide = width > own.WIDEST
    again = (2 * count * width, 2 * width * own.WIDE_AN_SM) if wide else (0, 0)
    form = "online, read twice: from L2 where the rows in flight fit it" if wide else "in registers"
    return Experiment(
        f"{('softmax', 'LayerNorm', 'RMSNorm')[kind]}, {count} rows of {width}",
        [
            Variant("eager, op by op", apart, _call(unfused, data)),
            Variant("torch's own kernel", [(moved, 0)], _call(library, data)),
            Variant("torch.compile", [(moved, 0)], _compiled(unfused, data)),
            Variant("Triton", [(moved, 0)], _call(partial(own.row_reduction, kind=kind), with_out), again=again),
        ],
        ("eager, op by op", "Triton"),
        f"a reduction and its consumers in one pass over HBM ({form})",
    )


def few_rows(count: int, width: int) -> Experiment:
    """RMSNorm of a few wide rows as graphs, where the form that moves more bytes fills the card."""
    by_name = {each.name: each for each in rows(own.RMS_NORM, width, count * width).variants}
    names = ("Triton", "eager, op by op")
    return Experiment(
        f"limit: RMSNorm of {count} rows of {width}",
        [replace(by_name[name], make=_as_graph(by_name[name].make), host=False) for name in names],
        names,
        f"fused, {count} blocks keep {count} SMs busy and the card waits, which bytes do not tell; op by op every SM has work",
    )


def gemm(m: int, n: int, k: int, why: str, block: tuple[int, int, int] = (128, 256, 64)) -> Experiment:
    """gelu(a b^T + bias), and a b^T + residual."""
    out_bytes = 2 * m * n
    product = (2 * (m * k + n * k) + out_bytes, 2 * m * n * k)
    with_residual = (product[0] + out_bytes, product[1])
    once, twice = (2 * out_bytes, 0), (3 * out_bytes, 0)
    data, with_out = (_random((m, k), (n, k), (n,), *[(m, n)] * outs) for outs in (1, 2))

    def bias_gelu(a: Tensor, b: Tensor, bias: Tensor, _: Tensor) -> Tensor:
        return F.gelu(a @ b.t() + bias, approximate="tanh")

    def lt(a: Tensor, b: Tensor, bias: Tensor, _: Tensor) -> Tensor:
        return torch._addmm_activation(bias, a, b.t(), use_gelu=True)

    def triton(epilogue: int) -> Make:
        return _call(partial(own.gemm, epilogue=epilogue, block=block), with_out)

    def apart(a: Tensor, b: Tensor, bias: Tensor, residual: Tensor, out: Tensor) -> Tensor:
        return F.gelu(own.gemm(a, b, bias, residual, out, own.NONE, block) + bias, approximate="tanh")

    return Experiment(
        f"GEMM and epilogue, {m} x {n} x {k}",
        [
            Variant("cuBLAS, no epilogue", [product], _call(lambda a, b, *_: a @ b.t(), data)),
            Variant("cuBLAS, eager bias and GELU", [product, once, once], _call(bias_gelu, data)),
            Variant("cuBLASLt's own epilogue", [product], _call(lt, data)),
            Variant("torch.compile", [product, once], _compiled(bias_gelu, data)),
            Variant("Triton, no epilogue", [product], triton(own.NONE)),
            Variant("Triton, eager bias and GELU", [product, once, once], _call(apart, with_out)),
            Variant("Triton, bias and GELU inside", [product], triton(own.BIAS_GELU)),
            Variant("cuBLAS, eager residual", [product, twice], _call(lambda a, b, _, r: r + a @ b.t(), data)),
            Variant("Triton, residual inside", [with_residual], triton(own.RESIDUAL)),
        ],
        ("Triton, eager bias and GELU", "Triton, bias and GELU inside"),
        why,
    )


def attention(heads: int, t: int, d: int, block: tuple[int, int] = (128, 64)) -> Experiment:
    """softmax(q k^T / sqrt(d)) v, not causal."""
    each, scores, ops = 2 * heads * t * d, 2 * heads * t * t, 2 * heads * t * t * d
    data = _random(*[(heads, t, d)] * 3)

    def three(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax((q * d**-0.5) @ k.transpose(1, 2), -1) @ v

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]

    apart = [(2 * each, 0), (2 * each + scores, ops), (2 * scores, 0), (2 * each + scores, ops)]
    return Experiment(
        f"attention, {heads} heads, {t} positions, {d} wide",
        [
            Variant("three kernels (and q's scale)", apart, _call(three, data)),
            Variant("torch.compile", apart[1:], _compiled(three, data)),
            Variant("torch's flash attention", [(4 * each, 2 * ops)], _call(sdpa, data)),
            Variant("Triton", [(4 * each, 2 * ops)], _call(partial(own.attention, block=block), _random(*[(heads, t, d)] * 4))),
        ],
        ("three kernels (and q's scale)", "Triton"),
        f"the scores ({scores / 1e9:.2f} GB, moved four times) never exist; what stays is arithmetic",
    )


def spill(n: int, count: int, live: int, block: int = 1024) -> Experiment:
    """A chain with more values alive than registers."""
    few, all_alive = f"Triton, {live} links alive", f"Triton, all {count} alive"

    def alive(number: int) -> Make:
        return _call(partial(own.links, count=count, live=number, block=block), _random((n,), (n,)))

    return Experiment(
        f"limit: a chain of {count} links over {n * 2 / 1e6:.0f} MB",
        [Variant(few, [(4 * n, 0)], alive(live)), Variant(all_alive, [(4 * n, 0)], alive(count))],
        (all_alive, few),
        "one kernel, the same bytes and exponentials either way; what fits no register spills, and is moved after all",
    )


def training(tokens: int, width: int, mlp: int) -> Experiment:
    """An MLP's forward and backward pass, launched one by one and as a graph."""
    product = (2 * (tokens * width + tokens * mlp + width * mlp), 2 * tokens * width * mlp)
    # Three products forward, their weights' gradients and the down projection's input's; SiLU, *, and their gradients.
    kernels = [product] * 7 + [(2 * values * tokens * mlp, 0) for values in (2, 3, 3, 3, 3)]

    def step(x: Tensor, *weights: Tensor) -> object:
        gate, up, down = (each.requires_grad_() for each in weights)
        y = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        return torch.autograd.grad(y.sum(), (gate, up, down))

    make = _call(step, _random((tokens, width), (mlp, width), (mlp, width), (width, mlp)))
    return Experiment(
        f"limit: a training step of one MLP, {tokens} tokens, {width} to {mlp}",
        [Variant("eager", kernels, make), Variant("one graph", kernels, _as_graph(make), host=False)],
        ("eager", "one graph"),
        "kernels of milliseconds hide every launch: a graph gains nothing",
    )


def by_name() -> dict[str, list[Experiment]]:
    """Every experiment at its full size, by name; nothing is allocated yet."""
    bound = "limit: a GEMM bound by arithmetic hides its epilogue's bytes; fusing it gains next to nothing"
    return {
        "chain": [
            chain(TOKENS, WIDTH, "three passes over HBM, and a mask, become one"),
            chain(1, WIDTH, "at decode size bytes are nothing: launches rule, and one is cheaper than three"),
        ],
        "rows": [rows(kind, width) for kind in (own.SOFTMAX, own.LAYER_NORM, own.RMS_NORM) for width in (1024, 16384, 131072)],
        "gemm": [gemm(8192, 16384, 1024, "the epilogue's traffic goes; the GEMM's time does not")],
        "attention": [attention(32, 8192, 128)],
        "limits": [
            gemm(8192, 8192, 8192, bound),
            spill(1 << 25, 64, 16),
            few_rows(4, 1 << 20),
            chain(
                256, WIDTH, "it fits an L2 of 50 MB, so what the unfused passes move costs less than HBM's price", graph=True
            ),
            training(8192, 4096, 11008),
        ],
    }


def _random(*shapes: tuple[int, ...]) -> Data:
    """Makes bfloat16 tensors of these shapes; the last ones may be outputs."""
    return lambda device: [torch.randn(shape, device=device, dtype=BF16) for shape in shapes]


def _call(function: Callable[..., object], data: Data) -> Make:
    return lambda device: partial(function, *data(device))


def _compiled(function: Callable[..., object], data: Data) -> Make:
    def make(device: torch.device) -> Play:
        torch._dynamo.reset()  # it counts recompilations by code, and soon gives up on functions made in one place
        return partial(torch.compile(function, fullgraph=True, dynamic=False), *data(device))

    return make


def _as_graph(make: Make) -> Make:
    """The same as a graph's replay; on a CPU the call itself."""
    return lambda device: graph_of(make(device), 1) if device.type == "cuda" else make(device)
