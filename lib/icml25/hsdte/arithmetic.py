"""Error-free transformations, and arithmetic on tensors of components.

A number is a tuple of floats, counted by a tensor's first axis. Everything is made
of ``+ - * /`` without branches that depend on the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = [
    "fast_two_sum",
    "product_is_exact",
    "renormalize",
    "two_prod",
    "two_sum",
]

#: Significand bits p, and Veltkamp's splitter 2^ceil(p/2) + 1.
BITS = {torch.float64: 53, torch.float32: 24}
_SPLITTER = {torch.float64: 2.0**27 + 1, torch.float32: 2.0**12 + 1}
#: Components that the exponents leave room for; a tail that underflows loses bits.
MAX_TERMS = {torch.float64: 8, torch.float32: 4}


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    r"""The rounded sum and its exact error, for operands of any size (Knuth; 6 flops).

    :math:`s = a \oplus b` and :math:`e` with :math:`s + e = a + b` exactly, barring
    overflow.

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

    :math:`p = a \otimes b` and :math:`e` with :math:`p + e = ab` exactly, unless
    :math:`|ab|` falls below about :math:`2^{-970}` (float64) or :math:`2^{-103}`
    (float32), where :math:`e` underflows.

    Args:
        a, b: tensors of one dtype, broadcastable.
        method: ``"dekker"`` (17 flops, exact wherever IEEE rounding holds) or ``"fma"``
            (2 flops, exact only where ``addcmul`` is fused: ask
            ``product_is_exact`` first).

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
    turn the error term into zero without a word. So the fused form is used only after
    this.

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
        terms: components kept, :math:`t`.

    Returns:
        ``(terms, ...)`` with :math:`|x_{i+1}| \le \mathrm{ulp}(x_i)`; the sum is kept
        up to about one unit in the last place of the last term.
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


def distill(levels: list[list[Tensor]], terms: int) -> Tensor:
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


def add(a: Tensor, b: Tensor) -> Tensor:
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


def mul(a: Tensor, b: Tensor, terms: int, method: str) -> Tensor:
    if terms == 1:
        return a * b
    if terms == 2:  # double word times double word: error <= 5 * 2^(-2p)
        p, e = two_prod(a[0], b[0], method=method)
        # Not addcmul: fused or not would change the last bit from device to device.
        if b.shape[0] == 2:
            e = e + a[0] * b[1]
        if a.shape[0] == 2:
            e = e + a[1] * b[0]
        return torch.stack(fast_two_sum(p, e))
    levels = _partial_products(a.unsqueeze(1), b.unsqueeze(1), terms, method)
    return distill(levels, terms)


def dot(a: Tensor, b: Tensor, terms: int, method: str) -> Tensor:
    """Dot product over the last axis; one renormalisation for the whole sum."""
    a, b = a.movedim(-1, 1), b.movedim(-1, 1)  # (t, ..., d) -> (t, d, ...)
    if terms == 1:
        return (a * b).sum(1)
    return distill(_partial_products(a, b, terms, method), terms)


def pad(x: Tensor, terms: int) -> Tensor:
    missing = terms - x.shape[0]
    if missing <= 0:
        return x[:terms]
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def reciprocal(x: Tensor, method: str) -> Tensor:
    """Newton: ``r <- r + r (1 - x r)`` doubles the good bits, ceil(log2 t) times."""
    r = x[:1].reciprocal()
    while r.shape[0] < x.shape[0]:
        half, terms = r.shape[0], min(2 * r.shape[0], x.shape[0])
        residual = _one_minus(mul(x[:terms], r, terms, method))
        step = mul(r, residual[:half], half, method)
        r = add(pad(r, terms), pad(step, terms))
    return r


def rsqrt(x: Tensor, method: str) -> Tensor:
    """Newton: ``r <- r + r (1 - x r^2) / 2``."""
    # torch.rsqrt is an estimate on some devices; 1/sqrt is rounded twice everywhere.
    r = x[:1].sqrt().reciprocal()
    while r.shape[0] < x.shape[0]:
        half, terms = r.shape[0], min(2 * r.shape[0], x.shape[0])
        square = mul(r, r, terms, method)
        residual = _one_minus(mul(x[:terms], square, terms, method))
        step = mul(r, residual[:half], half, method) * 0.5
        r = add(pad(r, terms), pad(step, terms))
    return r


def _one_minus(x: Tensor) -> Tensor:
    one = torch.zeros_like(x)
    one[0] = 1
    return add(one, -x)
