"""Owns rule N, the one numeric rule that says whether logits are right. Does not own how they are made (check, hugging_face).

e is the largest difference between our logits and Hugging Face's in float32; e0 is the same for Hugging Face in the run's own
dtype, so it is what rounding alone costs. Ours may cost twice that, and must choose the same token wherever Hugging Face's
choice is clear of rounding.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.sampling import lowest_argmax

FLOAT32_BOUND = 1e-3


@dataclass(frozen=True)
class Verdict:
    """What rule N says of one set of logits.

    Attributes:
        e: max |ours - HF float32| over all positions and ids.
        e0: max |HF in the run's dtype - HF float32|; 0 in a float32 run.
        bound: what e may be: 2 e0 + 1e-3 max |HF float32|, or 1e-3 in a float32 run.
        scale: max |HF float32|.
        float32: whether it was judged as a float32 run.
        positions: positions compared.
        decided: of these, the positions where HF float32's best id leads the second by more than 4 e0 (2 bound in float32).
        agreed: of the decided ones, those where our greedy id is HF float32's.
        passed: e within the bound and every decided position agreed. A NaN anywhere fails.
        errors: max |ours - HF float32| of each position, to see where an error starts.
    """

    e: float
    e0: float
    bound: float
    scale: float
    float32: bool
    positions: int
    decided: int
    agreed: int
    passed: bool
    errors: tuple[float, ...]

    def __str__(self) -> str:
        verdict = "pass" if self.passed else "FAIL"
        allowed = "float32 bound" if self.float32 else f"bound, e0 {self.e0:.3e}, max |HF float32| {self.scale:.3e}"
        return (
            f"rule N {verdict}: e {self.e:.3e} against {self.bound:.3e} ({allowed}); greedy agrees at {self.agreed} of "
            f"{self.decided} decided positions ({self.positions} compared)"
        )

    def as_json(self) -> dict[str, Any]:
        """The fields as plain values; NaN and Infinity, which JSON lacks, become words."""
        fields = {**asdict(self), "errors": [_finite(x) for x in self.errors]}
        return {name: _finite(value) if isinstance(value, float) else value for name, value in fields.items()}


def rule_n(ours: Tensor, reference: Tensor, same_dtype: Tensor | None) -> Verdict:
    """Judge logits against Hugging Face's of the same token ids, position by position.

    Args:
        ours: `[T, V]` float32.
        reference: `[T, V]`, Hugging Face in float32.
        same_dtype: `[T, V]`, Hugging Face in the run's dtype; None for a float32 run, which has a bound of its own.

    Raises:
        ValueError: the shapes differ, or there is no position.
    """
    shapes = {tuple(x.shape) for x in (ours, reference, same_dtype) if x is not None}
    if len(shapes) != 1 or ours.dim() != 2 or ours.numel() == 0:
        raise ValueError(f"logits to compare must have one shape [T, V] with T and V above 0; got {sorted(shapes)}")
    want = reference.to(ours.device)
    # Tensor.amax carries a NaN to the end, where every comparison with it is false; Python's max would drop it.
    errors = (ours - want).abs().amax(dim=1)  # [T]
    e, scale, e0, bound = float(errors.amax()), float(want.abs().amax()), 0.0, FLOAT32_BOUND
    if same_dtype is not None:
        e0 = float((same_dtype.to(ours.device) - want).abs().amax())
        bound = 2 * e0 + 1e-3 * scale
    best = want.topk(min(2, want.shape[1]), dim=1).values
    decided = best[:, 0] - best[:, -1] > (4 * e0 if same_dtype is not None else 2 * bound)
    agreed = decided & (lowest_argmax(ours) == lowest_argmax(want))
    return Verdict(
        e=e,
        e0=e0,
        bound=bound,
        scale=scale,
        float32=same_dtype is None,
        positions=len(ours),
        decided=int(decided.sum()),
        agreed=int(agreed.sum()),
        passed=e <= bound and torch.equal(agreed, decided),
        errors=tuple(errors.tolist()),
    )


def _finite(value: float) -> float | str:
    return value if abs(value) < float("inf") else str(value)
