"""Floating-point expansions: one number kept as an unevaluated sum of ordinary floats.

Everything is made of ``+ - * /`` on tensors, without branches that depend on the data,
so it runs on any device and in batches. The component axis comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Expansion",
    "fast_two_sum",
    "max_radius",
    "product_is_exact",
    "renormalize",
    "two_prod",
    "two_sum",
]

#: Significand bits p, and Veltkamp's splitter 2^ceil(p/2) + 1.
BITS = {torch.float64: 53, torch.float32: 24}
_SPLITTER = {torch.float64: 2.0**27 + 1, torch.float32: 2.0**12 + 1}
MAX_TERMS = 8


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    r"""The rounded sum and its exact error, for operands of any size (Knuth; 6 flops).

    $s = a \oplus b$ and $e$ with $s + e = a + b$ exactly, barring overflow.

    Args:
        a, b: tensors of one dtype, broadcastable.

    Returns:
        ``(s, e)``.
    """
    s = a + b
    c = s - a
    return s, (a - (s - c)) + (b - c)


def fast_two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`two_sum` in 3 flops, where ``|a| >= |b|`` or ``a = 0`` (Dekker)."""
    s = a + b
    return s, b - (s - a)


def _split(a: Tensor) -> tuple[Tensor, Tensor]:
    """Veltkamp: ``a = high + low``, each short enough that products are exact."""
    c = a * _SPLITTER[a.dtype]
    high = c - (c - a)
    return high, a - high


def two_prod(a: Tensor, b: Tensor, *, method: str = "dekker") -> tuple[Tensor, Tensor]:
    r"""The rounded product and its exact error.

    $p = a \otimes b$ and $e$ with $p + e = ab$ exactly, unless $|ab|$ falls below about
    $2^{-970}$ (float64) or $2^{-103}$ (float32), where $e$ underflows.

    Args:
        a, b: tensors of one dtype, broadcastable.
        method: ``"dekker"`` (17 flops, exact wherever IEEE rounding holds) or ``"fma"``
            (2 flops, exact only where ``addcmul`` is fused: ask
            :func:`product_is_exact` first).

    Returns:
        ``(p, e)``.
    """
    p = a * b
    if method == "fma":
        return p, torch.addcmul(-p, a, b)
    return p, _product_error(p, *_split(a), *_split(b))


def _product_error(p: Tensor, ah: Tensor, al: Tensor, bh: Tensor, bl: Tensor) -> Tensor:
    # Each half-length product is exact, so it does not matter whether addcmul is fused.
    e = torch.addcmul(-p, ah, bh)
    e = torch.addcmul(e, ah, bl)
    e = torch.addcmul(e, al, bh)
    return torch.addcmul(e, al, bl)


def product_is_exact(
    method: str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
    compiled: bool = False,
) -> bool:
    """Self-test: does this product deliver its error term here, in this mode?

    A processor without fused kernels, or a compiler that contracts ``a*b - c``, can
    turn the error term into zero without a word. So the fused form is used only after this.

    Args:
        method: ``"dekker"`` or ``"fma"``.
        device: where to test.
        dtype: float64 or float32.
        compiled: test under ``torch.compile`` (needs a C++ compiler on the CPU).

    Returns:
        True if 4096 random products, over 40 binades, agree with integer arithmetic.
    """
    bits = BITS[dtype]
    generator = torch.Generator().manual_seed(bits)
    whole = torch.randint(2 ** (bits - 1), 2**bits, (2, 4096), generator=generator)
    floats = whole.to(dtype).to(device)
    exponents = torch.randint(-20, 20, (2, 4096), generator=generator).to(device)
    product: Callable[..., tuple[Tensor, Tensor]] = two_prod
    if compiled:
        product = torch.compile(two_prod, fullgraph=True)
    p, e = product(*torch.ldexp(floats, exponents), method=method)
    p, e = (torch.ldexp(x, -exponents.sum(0)).cpu().tolist() for x in (p, e))
    # Products of whole numbers are known exactly from Python's integers.
    exact = [x * y for x, y in zip(*whole.tolist(), strict=True)]
    return all(int(x) + int(y) == z for x, y, z in zip(p, e, exact, strict=True))


def renormalize(components: Sequence[Tensor], terms: int) -> Tensor:
    r"""Bring overlapping components into an expansion of ``terms`` terms.

    A bottom-up pass of :func:`two_sum` leaves the rounded total in front and its errors
    behind; repeated on the errors it peels off term after term.

    Args:
        components: floats of roughly decreasing size, each ``(...)``; their sum is
            meant.
        terms: components kept, $t$.

    Returns:
        ``(terms, ...)`` with $|x_{i+1}| \le \mathrm{ulp}(x_i)$; the sum is kept up to
        about one unit in the last place of the last term.
    """
    rest = _vec_sum(list(components))
    kept = []
    for _ in range(terms):
        rest = _vec_sum(rest)
        kept.append(rest[0])
        rest = rest[1:] or [torch.zeros_like(kept[0])]
    for i in range(terms - 1):
        kept[i], kept[i + 1] = fast_two_sum(kept[i], kept[i + 1])
    return torch.stack(kept)


def _vec_sum(x: list[Tensor]) -> list[Tensor]:
    s = x[-1]
    errors = []
    for each in reversed(x[:-1]):
        s, e = two_sum(each, s)
        errors.append(e)
    return [s, *reversed(errors)]


def _distill(levels: list[list[Tensor]], terms: int) -> Tensor:
    """Add up many floats by order of magnitude; ``levels[i]`` is near ``2^(-p i)``.

    Each level is summed as a binary tree and hands its exact errors to the next; only
    the last one, of the size of the final rounding, is summed plainly.
    """
    heads = []
    carry: list[Tensor] = []
    for level in levels[:terms]:
        x = torch.cat([*level, *carry])  # (k, ...)
        carry = []
        while x.shape[0] > 1:
            half = x.shape[0] // 2
            s, e = two_sum(x[:half], x[half : 2 * half])
            carry.append(e)
            x = torch.cat([s, x[2 * half :]]) if x.shape[0] % 2 else s
        heads.append(x[0])
    last = [*levels[terms], *carry] if len(levels) > terms else carry
    if last:
        heads.append(torch.cat(last).sum(0))
    return renormalize(heads, terms)


# The operations below take and give component tensors (t, ...) of equal rank.


def _add(a: Tensor, b: Tensor) -> Tensor:
    terms = a.shape[0]
    if terms == 1:
        return a + b
    s, e = two_sum(a, b)
    if terms == 2:  # accurate double-word sum: error <= 3 * 2^(-2p), also if it cancels
        high, low = fast_two_sum(s[0], e[0] + s[1])
        return torch.stack(fast_two_sum(high, low + e[1]))
    heads, tail = [s[0]], e[-1]
    x, e = s[1:], e[:-1]
    while x.shape[0]:
        x, carry = two_sum(x, e)
        heads.append(x[0])
        tail = tail + carry[-1]
        x, e = x[1:], carry[:-1]
    return renormalize([*heads, tail], terms)


def _partial_products(
    a: Tensor, b: Tensor, terms: int, method: str
) -> list[list[Tensor]]:
    """All products of components that matter for ``terms``, by level."""
    levels: list[list[Tensor]] = [[] for _ in range(terms + 1)]
    if method == "dekker":
        (ah, al), (bh, bl) = _split(a), _split(b)
    for i in range(a.shape[0]):
        k = min(b.shape[0], terms - i)
        p = a[i] * b[:k]
        if method == "dekker":
            e = _product_error(p, ah[i], al[i], bh[:k], bl[:k])
        else:
            e = torch.addcmul(-p, a[i], b[:k])
        for j in range(k):
            levels[i + j].append(p[j])
            levels[i + j + 1].append(e[j])
        if k < b.shape[0]:
            levels[terms].append(a[i] * b[k])
    return levels


def _mul(a: Tensor, b: Tensor, terms: int, method: str) -> Tensor:
    if terms == 1:
        return a * b
    if terms == 2:  # double word times double word: error <= 5 * 2^(-2p)
        p, e = two_prod(a[0], b[0], method=method)
        if b.shape[0] == 2:
            e = torch.addcmul(e, a[0], b[1])
        if a.shape[0] == 2:
            e = torch.addcmul(e, a[1], b[0])
        return torch.stack(fast_two_sum(p, e))
    levels = _partial_products(a.unsqueeze(1), b.unsqueeze(1), terms, method)
    return _distill(levels, terms)


def _dot(a: Tensor, b: Tensor, terms: int, method: str) -> Tensor:
    """Dot product over the last axis; one renormalisation for the whole sum."""
    a, b = a.movedim(-1, 1), b.movedim(-1, 1)  # (t, ..., d) -> (t, d, ...)
    if terms == 1:
        return (a * b).sum(1)
    return _distill(_partial_products(a, b, terms, method), terms)


def _pad(x: Tensor, terms: int) -> Tensor:
    missing = terms - x.shape[0]
    if missing <= 0:
        return x[:terms]
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def _reciprocal(x: Tensor, method: str) -> Tensor:
    """Newton: ``r <- r + r (1 - x r)`` doubles the good bits, ceil(log2 t) times."""
    r = x[:1].reciprocal()
    while r.shape[0] < x.shape[0]:
        half, terms = r.shape[0], min(2 * r.shape[0], x.shape[0])
        residual = _one_minus(_mul(x[:terms], r, terms, method))
        step = _mul(r, residual[:half], half, method)
        r = _add(_pad(r, terms), _pad(step, terms))
    return r


def _rsqrt(x: Tensor, method: str) -> Tensor:
    """Newton: ``r <- r + r (1 - x r^2) / 2``."""
    # torch.rsqrt is an estimate on some devices; 1/sqrt is rounded twice everywhere.
    r = x[:1].sqrt().reciprocal()
    while r.shape[0] < x.shape[0]:
        half, terms = r.shape[0], min(2 * r.shape[0], x.shape[0])
        square = _mul(r, r, terms, method)
        residual = _one_minus(_mul(x[:terms], square, terms, method))
        step = _mul(r, residual[:half], half, method) * 0.5
        r = _add(_pad(r, terms), _pad(step, terms))
    return r


def _one_minus(x: Tensor) -> Tensor:
    one = torch.zeros_like(x)
    one[0] = 1
    return _add(one, -x)


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
    as one term. Relative errors are near $2^{-tp+2}$ for a product and a sum (the sum
    relative to the larger operand) and $2^{-tp+6}$ for quotients and roots. Gradients
    are those of the represented value.

    Args:
        components: ``(t, ...)``, float64 or float32, largest first.
        product: ``"dekker"`` or ``"fma"``, see :func:`two_prod`.

    Raises:
        TypeError: the components are neither float64 nor float32.
        ValueError: no component, more than 8, or an unknown product.

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
        if components.ndim == 0 or not 1 <= components.shape[0] <= MAX_TERMS + 1:
            raise ValueError(
                f"components of shape {tuple(components.shape)}: the first axis holds "
                f"1 to {MAX_TERMS} terms"
            )
        if product not in ("dekker", "fma"):
            raise ValueError(f"product={product!r}: allowed are 'dekker' and 'fma'")
        self.components = components
        self.product = product

    @classmethod
    def from_float(cls, x: Tensor, terms: int, *, product: str = "dekker") -> Expansion:
        """Plain floats as expansions with zeros behind; exact and differentiable."""
        _check_terms(terms)
        return cls(_pad(x.unsqueeze(0), terms), product=product)

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

        _check_terms(terms)
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
        return self._new(_pad(self.components, terms))

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
            return _add(_pad(a, terms), _pad(b, terms))

        return self._new(_lift(op, torch.add, a, b))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Expansion:
        return self + -other

    def __rsub__(self, other: Any) -> Expansion:
        return -self + other

    def __mul__(self, other: Any) -> Expansion:
        a, b, method = self._operands(other)
        terms = max(a.shape[0], b.shape[0])
        op = lambda a, b: _mul(a, b, terms, method)  # noqa: E731
        return self._new(_lift(op, torch.mul, a, b))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Expansion:
        if not isinstance(other, Expansion):
            _, b, _ = self._operands(other)
            other = self._new(_pad(b, self.terms))
        return self * other.with_terms(max(self.terms, other.terms)).reciprocal()

    def __rtruediv__(self, other: Any) -> Expansion:
        return self.reciprocal() * other

    def reciprocal(self) -> Expansion:
        """``1 / x`` by Newton's iteration; zero gives an infinity or a NaN."""
        op = lambda x: _reciprocal(x, self.product)  # noqa: E731
        return self._new(_lift(op, torch.reciprocal, self.components))

    def rsqrt(self) -> Expansion:
        """``1 / sqrt(x)`` for positive numbers; NaN or infinity elsewhere."""
        op = lambda x: _rsqrt(x, self.product)  # noqa: E731
        return self._new(_lift(op, torch.rsqrt, self.components))

    def sqrt(self) -> Expansion:
        """``sqrt(x)``; zero gives zero, negative numbers NaN."""

        def op(x: Tensor) -> Tensor:
            root = _mul(x, _rsqrt(x, self.product), x.shape[0], self.product)
            return torch.where(x[:1] == 0, torch.zeros_like(root), root)

        return self._new(_lift(op, torch.sqrt, self.components))

    def sum(self, dim: int = -1) -> Expansion:
        """Sum over one axis, rounded once."""
        dim = dim % len(self.shape)

        def op(x: Tensor) -> Tensor:
            if x.shape[0] == 1:
                return x.sum(1 + dim)
            levels = [[each.movedim(dim, 0)] for each in x]
            return _distill([*levels, []], x.shape[0])

        return self._new(_lift(op, lambda x: x.sum(dim), self.components))

    def dot(self, other: Any) -> Expansion:
        r"""$\sum_i x_i y_i$ over the last axis, rounded once.

        The error is about $2^{-tp+4}\sum_i |x_i y_i|$.
        """
        a, b, method = self._operands(other)
        a, b = (
            x.expand(x.shape[0], *torch.broadcast_shapes(a.shape[1:], b.shape[1:]))
            for x in (a, b)
        )
        terms = max(a.shape[0], b.shape[0])
        op = lambda a, b: _dot(a, b, terms, method)  # noqa: E731
        return self._new(_lift(op, lambda x, y: (x * y).sum(-1), a, b))


def max_radius(terms: int, dtype: torch.dtype = torch.float64) -> float:
    r"""The hyperbolic radius at which ``t`` components run out of bits.

    A point at distance $R$ has $1 - |x| \approx 2e^{-R}$, and numbers near 1 are kept
    to about $2^{-tp}$, so $R_{\max} = (tp + 1) \ln 2$ (``eq-rmax`` in the book).

    Raises:
        ValueError: ``terms`` is not 1 to 8, or the dtype has no expansions.
    """
    _check_terms(terms)
    if dtype not in BITS:
        raise ValueError(f"dtype={dtype}: allowed are torch.float64 and torch.float32")
    return (terms * BITS[dtype] + 1) * 0.6931471805599453


def _check_terms(terms: int) -> None:
    if isinstance(terms, bool) or not isinstance(terms, int):
        raise ValueError(f"terms={terms!r}: give a whole number from 1 to {MAX_TERMS}")
    if not 1 <= terms <= MAX_TERMS:
        raise ValueError(f"terms={terms}: allowed are 1 to {MAX_TERMS}")
