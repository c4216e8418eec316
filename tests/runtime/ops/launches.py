"""What a decode step sets the GPU to do, told without one: the step is played on PyTorch's fake CUDA tensors, which have shapes
and no memory, and every Triton launch and torch operation is written down in its place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from models.config import ModelConfig
from models.decoder import Decoder
from models.layout import allocate, pieces
from models.quantized import allocate_lowbit
from models.scheme import Stored
from runtime.decode_step import DecodeStep
from runtime.kv_cache import KVCache
from runtime.ops import SlotState, load_ops
from runtime.sampling import Sampler, Variant

CUDA = torch.device("cuda", 0)
PROCESSORS = 132
NO_KERNEL = ("aten.empty", "aten.empty_like", "prim.device")


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel.

    Attributes:
        arguments: by the kernel's parameter names; tensors are fake.
        options: num_warps and the like, as the wrapper gave them.
    """

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """What the compiled kernel, and so a profiler, calls it."""
        constants = {each.name: self.arguments.get(each.name) for each in self.kernel.params}
        constants = {name: value for name, value in constants.items() if not isinstance(value, torch.Tensor)}
        return self.kernel.repr(SimpleNamespace(constants=constants)).rpartition(".")[2]


def played_step(
    shape: ModelConfig,
    ops: str,
    batch: int,
    capacity: int = 8192,
    pdl: bool = True,
    draw: Variant = "plain",
    format: str = "bf16",
    stored: Stored | None = None,
) -> list[Launch | str]:
    """Triton launches, and names of torch's operations that run on the device, of one step in their order: the second step,
    since the first one makes its workspaces."""
    slots = torch.zeros(batch, dtype=torch.int32, device="meta")
    with FakeTensorMode() as mode, torch.inference_mode(), writing_down() as told:
        dtype = getattr(torch, shape.dtype)
        table = pieces(shape)
        weights = allocate(table, CUDA, dtype) if format == "bf16" else allocate_lowbit(table, format, stored, CUDA, dtype)
        cache = KVCache.allocate(shape.num_layers, batch, shape.num_kv_heads, capacity, shape.head_dim, dtype, CUDA)
        state = SlotState.allocate(batch, torch.device("meta"), shape.vocab_size)  # a torch without CUDA cannot index on it
        state = replace(state, **{name: FakeTensor(mode, tensor, CUDA) for name, tensor in vars(state).items()})
        step = DecodeStep(Decoder(shape, weights, capacity), load_ops(ops, pdl), Sampler(), cache, state)
        for _ in range(2):
            told.clear()
            step(FakeTensor(mode, slots, CUDA), draw)
    return told


def _no_tables(rope: Any, head_dim: int, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = (torch.empty((length, head_dim // 2), device=device) for _ in range(2))
    return cos, sin


@contextmanager
def writing_down() -> Iterator[list[Launch | str]]:
    """What launches and operations would have been, in place of them."""
    told: list[Launch | str] = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not func.is_view and str(func.overloadpacket) not in NO_KERNEL:
                told.append(str(func.overloadpacket))
            return func(*args, **(kwargs or {}))

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        names = {parameter.name for parameter in kernel.params}
        given = kernel.signature.bind(*args, **{name: value for name, value in named.items() if name in names})
        options = {name: value for name, value in named.items() if name not in names}
        told.append(Launch(kernel, grid, dict(given.arguments), options))

    properties = SimpleNamespace(multi_processor_count=PROCESSORS)
    with (
        patch.object(JITFunction, "run", run),
        patch("models.decoder.rotary_tables", _no_tables),  # filled from the host, which a fake GPU cannot be
        patch.object(torch.cuda, "get_device_properties", lambda device: properties),
        Operations(),
    ):
        yield told
