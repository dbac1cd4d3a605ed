"""Floating-point expansions: one number kept as an unevaluated sum of ordinary floats.

Everything is made of ``+ - * /`` on tensors, without branches that depend on the data,
so it runs on any device and in batches. The component axis comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from icml25.hsdte.arithmetic import (
    BITS,
    MAX_TERMS,
    add,
    add_products,
    add_to_float,
    distill,
    dot,
    mul,
    pad,
    product_is_exact,
    reciprocal,
    rsqrt,
    rsqrt_near_one,
)

__all__ = ["MAX_TERMS", "Expansion", "max_radius"]


class _Lifted(torch.autograd.Function):
    """Forward on components, backward on the represented value.

    Differentiating through every error term would be right and ten times the work; the
    value is what is meant, so its derivative is that of the plain operation ``twin``.
    """

    @staticmethod
    def forward(ctx: Any, op: Callable, twin: Callable, *components: Tensor) -> Tensor:
        ctx.twin = twin
        ctx.save_for_backward(*components)
        return op(*components)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        with torch.enable_grad():
            values = [c.sum(0).requires_grad_() for c in saved]
            grads = torch.autograd.grad(ctx.twin(*values), values, grad[0])
        # The value is the sum of the components: each has the same derivative.
        spread = (g.expand_as(c) for g, c in zip(grads, saved, strict=True))
        return None, None, *spread


def _lift(op: Callable, twin: Callable, *components: Tensor) -> Tensor:
    if torch.is_grad_enabled() and any(c.requires_grad for c in components):
        return _Lifted.apply(op, twin, *components)
    return op(*components)


class Expansion:
    r"""A tensor of numbers, each the exact sum of ``t`` floats of decreasing size.

    With $p$ bits a float, $t$ components carry about $tp$ bits:
    $x = x_1 + \dots + x_t$, $|x_{i+1}| \le \mathrm{ulp}(x_i)$.

    Arithmetic keeps the larger number of terms of its operands; a plain tensor counts
    as one term. Relative errors are near $2^{-tp+2}$ for a product and a sum (the
    sum relative to the larger operand) and $2^{-tp+6}$ for quotients and roots.
    Gradients are those of the represented value.

    Args:
        components: ``(t, ...)``, float64 or float32, largest first.
        product: ``"dekker"`` or ``"fma"``, see :func:`two_prod`.

    Raises:
        TypeError: the components are neither float64 nor float32.
        ValueError: no component, more than 8 (float64) or 4 (float32: its exponents
            hold no more), an unknown product, or a fused one where the self-test fails.

    Example:
        >>> three = torch.tensor(3.0, dtype=torch.float64)
        >>> third = Expansion.from_float(three, terms=2).reciprocal()
        >>> float((third * 3.0 - 1.0).to_float())
        0.0
    """

    __slots__ = ("components", "product")

    def __init__(self, components: Tensor, *, product: str = "dekker") -> None:
        if components.dtype not in BITS:
            raise TypeError(
                f"components have dtype {components.dtype}; use float64 or float32"
            )
        most = MAX_TERMS[components.dtype]
        # One more than a caller may ask for: distances guard with it.
        if components.ndim == 0 or not 1 <= components.shape[0] <= most + 1:
            raise ValueError(
                f"components of shape {tuple(components.shape)}: the first axis holds "
                f"1 to {most} terms of {components.dtype}"
            )
        if product not in ("dekker", "fma"):
            raise ValueError(f"product={product!r}: allowed are 'dekker' and 'fma'")
        if product == "fma" and not _is_fused(components.device, components.dtype):
            raise ValueError(
                f"product='fma': addcmul is not fused on {components.device} for "
                f"{components.dtype}, its error term would be lost; use 'dekker'"
            )
        self.components = components
        self.product = product

    @classmethod
    def from_float(cls, x: Tensor, terms: int, *, product: str = "dekker") -> Expansion:
        """Plain floats as expansions with zeros behind; exact and differentiable."""
        _check_terms(terms, x.dtype)
        return cls(pad(x.unsqueeze(0), terms), product=product)

    @classmethod
    def from_mpmath(
        cls,
        values: Sequence[Any],
        terms: int,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> Expansion:
        """A list of multiple-precision numbers (or decimal texts), each cut greedily.

        Args:
            values: ``n`` values that ``mpmath.mpf`` takes.
            terms: components each.
            dtype: dtype of the components.
            device: where the components go.

        Returns:
            Shape ``(n,)``; the error is below half a unit of the last component.
        """
        import mpmath

        _check_terms(terms, dtype)
        rows = []
        with mpmath.workprec(64 * (terms + 2) + 200):
            for value in values:
                rest = mpmath.mpf(value)
                row = []
                for _ in range(terms):
                    head = torch.tensor(float(rest), dtype=dtype).item()
                    row.append(head)
                    rest -= head
                rows.append(row)
        components = torch.tensor(rows, dtype=dtype, device=device).reshape(-1, terms)
        return cls(components.T.contiguous())

    def to_float(self, dtype: torch.dtype | None = None) -> Tensor:
        """The represented values, rounded to ``dtype`` (default: the components')."""
        components = self.components if dtype is None else self.components.to(dtype)
        # Smallest first, so that only the last addition rounds visibly.
        return components.flip(0).sum(0) if self.terms > 1 else components[0]

    def to_mpmath(self, index: tuple[int, ...] | int = ()) -> Any:
        """One represented value as an ``mpmath.mpf`` at the working precision."""
        import mpmath

        index = index if isinstance(index, tuple) else (index,)
        return mpmath.fsum(float(c[index]) for c in self.components)

    @property
    def terms(self) -> int:
        return self.components.shape[0]

    @property
    def shape(self) -> torch.Size:
        return self.components.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.components.dtype

    @property
    def device(self) -> torch.device:
        return self.components.device

    def __repr__(self) -> str:
        return f"Expansion(terms={self.terms}, shape={tuple(self.shape)}, {self.dtype})"

    def with_terms(self, terms: int) -> Expansion:
        """Zeros appended, or the last components dropped."""
        return self._new(pad(self.components, terms))

    def to(self, device: torch.device | str) -> Expansion:
        """The same bits on another device."""
        return self._new(self.components.to(device))

    def __getitem__(self, index: Any) -> Expansion:
        index = index if isinstance(index, tuple) else (index,)
        return self._new(self.components[(slice(None), *index)])

    def _new(self, components: Tensor) -> Expansion:
        return Expansion(components, product=self.product)

    def _operands(self, other: Any) -> tuple[Tensor, Tensor, str]:
        if isinstance(other, Tensor):
            other = Expansion(other.unsqueeze(0), product=self.product)
        elif isinstance(other, int | float):
            other = Expansion(self.components.new_full((1,), other))
        if not isinstance(other, Expansion):
            raise TypeError(f"no arithmetic of Expansion and {type(other).__name__}")
        if other.dtype != self.dtype:
            raise TypeError(f"mixed dtypes: {self.dtype} and {other.dtype}")
        a, b = self.components, other.components
        rank = max(a.ndim, b.ndim)
        a, b = (
            x.reshape(x.shape[0], *[1] * (rank - x.ndim), *x.shape[1:]) for x in (a, b)
        )
        return a, b, self.product

    def __neg__(self) -> Expansion:
        return self._new(-self.components)

    def __add__(self, other: Any) -> Expansion:
        a, b, _ = self._operands(other)
        terms = max(a.shape[0], b.shape[0])

        def op(a: Tensor, b: Tensor) -> Tensor:
            return add(pad(a, terms), pad(b, terms))

        return self._new(_lift(op, torch.add, a, b))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Expansion:
        return self + -other

    def __rsub__(self, other: Any) -> Expansion:
        return -self + other

    def __mul__(self, other: Any) -> Expansion:
        if isinstance(other, int | float) and abs(math.frexp(other)[0]) == 0.5:
            return self._new(self.components * other)  # a power of two is exact
        a, b, method = self._operands(other)
        terms = max(a.shape[0], b.shape[0])
        op = lambda a, b: mul(a, b, terms, method)  # noqa: E731
        return self._new(_lift(op, torch.mul, a, b))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Expansion:
        if not isinstance(other, Expansion):
            _, b, _ = self._operands(other)
            other = self._new(pad(b, self.terms))
        return self * other.with_terms(max(self.terms, other.terms)).reciprocal()

    def __rtruediv__(self, other: Any) -> Expansion:
        return self.reciprocal() * other

    def reciprocal(self) -> Expansion:
        """``1 / x`` by Newton's iteration; zero gives an infinity or a NaN."""
        op = lambda x: reciprocal(x, self.product)  # noqa: E731
        return self._new(_lift(op, torch.reciprocal, self.components))

    def rsqrt(self) -> Expansion:
        """``1 / sqrt(x)`` for positive numbers; NaN or infinity elsewhere."""
        op = lambda x: rsqrt(x, self.product)  # noqa: E731
        return self._new(_lift(op, torch.rsqrt, self.components))

    def rsqrt_near_one(self) -> Expansion:
        """:meth:`rsqrt` of numbers that are 1 but for a few roundings, at less cost."""
        op = lambda x: rsqrt_near_one(x, self.product)  # noqa: E731
        return self._new(_lift(op, torch.rsqrt, self.components))

    def sqrt(self) -> Expansion:
        """``sqrt(x)``; zero gives zero, negative numbers NaN."""

        def op(x: Tensor) -> Tensor:
            root = mul(x, rsqrt(x, self.product), x.shape[0], self.product)
            return torch.where(x[:1] == 0, torch.zeros_like(root), root)

        return self._new(_lift(op, torch.sqrt, self.components))

    def sum(self, dim: int = -1) -> Expansion:
        """Sum over one axis, rounded once."""
        dim = dim % len(self.shape)

        def op(x: Tensor) -> Tensor:
            if x.shape[0] == 1:
                return x.sum(1 + dim)
            levels = [[each.movedim(dim, 0)] for each in x]
            return distill([*levels, []], x.shape[0])

        return self._new(_lift(op, lambda x: x.sum(dim), self.components))

    def dot(self, other: Any) -> Expansion:
        r"""$\sum_i x_i y_i$ over the last axis, rounded once.

        The error is about $2^{-tp+4}\sum_i |x_i y_i|$.
        """
        a, b, method = self._operands(other)
        terms = max(a.shape[0], b.shape[0])
        op = lambda a, b: dot(a, b, terms, method)  # noqa: E731
        return self._new(_lift(op, lambda x, y: (x * y).sum(-1), a, b))

    def add_products(self, *pairs: tuple[Expansion, Expansion]) -> Expansion:
        r"""``x + a b + c d + ...`` with one rounding and the terms of ``x``.

        Args:
            pairs: factors of the products; their ranks are those of ``x``.
        """
        factors = [each.components for pair in pairs for each in pair]

        def op(base: Tensor, *factors: Tensor) -> Tensor:
            pairs = list(zip(factors[::2], factors[1::2], strict=True))
            return add_products(base, pairs, self.product)

        def twin(base: Tensor, *factors: Tensor) -> Tensor:
            return base + sum(map(torch.mul, factors[::2], factors[1::2]))

        return self._new(_lift(op, twin, self.components, *factors))

    def minus_as_float(self, other: Expansion, *, leading: bool = False) -> Tensor:
        """``x - y`` rounded to float64, right also where the two agree in most bits.

        Args:
            other: $y$.
            leading: the first components alone, where all others are zero: the same
                bits from one subtraction.
        """
        a, b, _ = self._operands(other)
        terms = max(a.shape[0], b.shape[0])

        def op(a: Tensor, b: Tensor) -> Tensor:
            if leading:
                return a[:1].to(torch.float64) - b[:1].to(torch.float64)
            return add_to_float(pad(a, terms), -pad(b, terms))[None]

        def twin(a: Tensor, b: Tensor) -> Tensor:
            return a.to(torch.float64) - b.to(torch.float64)

        return _lift(op, twin, a, b)[0]


def max_radius(terms: int, dtype: torch.dtype = torch.float64) -> float:
    r"""The hyperbolic radius at which ``t`` components run out of bits.

    A point at distance $R$ has $1 - |x| \approx 2e^{-R}$, and numbers near
    1 are kept to about $2^{-tp}$, so $R_{\max} = (tp + 1) \ln 2$
    (``hsdte-eq-rmax`` in the book).

    Raises:
        ValueError: the dtype has no expansions, or not so many terms.
    """
    _check_terms(terms, dtype)
    return (terms * BITS[dtype] + 1) * 0.6931471805599453


def _check_terms(terms: int, dtype: torch.dtype) -> None:
    if dtype not in BITS:
        raise ValueError(f"dtype={dtype}: allowed are torch.float64 and torch.float32")
    most = MAX_TERMS[dtype]
    if isinstance(terms, bool) or not isinstance(terms, int) or not 1 <= terms <= most:
        raise ValueError(f"terms={terms!r}: allowed are 1 to {most} of {dtype}")


@cache
def _is_fused(device: torch.device, dtype: torch.dtype) -> bool:
    return product_is_exact("fma", device=device, dtype=dtype)
