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

    $s = a \oplus b$ and $e$ with $s + e = a + b$ exactly, barring
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

    $p = a \otimes b$ and $e$ with $p + e = ab$ exactly, unless
    $|ab|$ falls below about $2^{-970}$ (float64) or $2^{-103}$
    (float32), where $e$ underflows.

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
        terms: components kept, $t$.

    Returns:
        ``(terms, ...)`` with $|x_{i+1}| \le \mathrm{ulp}(x_i)$; the sum is kept
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


def distill(levels: list[list[Tensor]], terms: int, kept: int | None = None) -> Tensor:
    """Add up many floats by order of magnitude; ``levels[i]`` is near ``2^(-p i)``.

    The sum is formed for ``terms`` terms; the leading ``kept`` are given back.

    Each level is summed as a binary tree and hands its exact errors to the next; only
    the last one, of the size of the final rounding, is summed plainly.
    """
    heads = []
    carry: list[Tensor] = []
    for level in levels[:terms]:
        parts = [*level, *carry]
        x = torch.cat(parts) if len(parts) > 1 else parts[0]  # (k, ...)
        carry = []
        while x.shape[0] > 1:
            half = x.shape[0] // 2
            s, e = two_sum(x[:half], x[half : 2 * half])
            carry.append(e)
            x = torch.cat([s, x[2 * half :]]) if x.shape[0] % 2 else s
        heads.append(x[0])
    last = [*levels[terms], *carry] if len(levels) > terms else carry
    if last:
        heads.append(_plain_sum(torch.cat(last)))
    return renormalize(heads, kept or terms)


def _plain_sum(x: Tensor) -> Tensor:
    """``(k, ...)`` summed in one fixed order: the same bits in every mode."""
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        s = x[:half] + x[half : 2 * half]
        x = torch.cat([s, x[2 * half :]]) if x.shape[0] % 2 else s
    return x[0]


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


def _two_prod_wide(a: Tensor, b: Tensor, method: str) -> tuple[Tensor, Tensor]:
    """Head and error of products of one or two components."""
    p, e = two_prod(a[0], b[0], method=method)
    # Not addcmul: fused or not would change the last bit from device to device.
    if b.shape[0] == 2:
        e = e + a[0] * b[1]
    if a.shape[0] == 2:
        e = e + a[1] * b[0]
    return p, e


def mul(a: Tensor, b: Tensor, terms: int, method: str) -> Tensor:
    if terms == 1:
        return a * b
    if terms == 2:  # double word times double word: error <= 5 * 2^(-2p)
        return torch.stack(fast_two_sum(*_two_prod_wide(a, b, method)))
    levels = _partial_products(a.unsqueeze(1), b.unsqueeze(1), terms, method)
    return distill(levels, terms)


def dot(a: Tensor, b: Tensor, terms: int, method: str) -> Tensor:
    """Dot product over the last axis; one renormalisation for the whole sum."""
    a, b = a.movedim(-1, 1), b.movedim(-1, 1)  # (t, ..., d) -> (t, d, ...)
    if terms == 1:
        return (a * b).sum(1)
    if terms == 2:  # Ogita, Rump and Oishi: exact heads, errors summed plainly
        heads, error = _two_prod_wide(a, b, method)
        errors = [error]
        while heads.shape[0] > 1:
            half = heads.shape[0] // 2
            s, error = two_sum(heads[:half], heads[half : 2 * half])
            odd = heads.shape[0] % 2
            heads = torch.cat([s, heads[2 * half :]]) if odd else s
            errors.append(error)
        return torch.stack(two_sum(heads[0], _plain_sum(torch.cat(errors))))
    return distill(_partial_products(a, b, terms, method), terms)


def add_products(
    base: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], method: str
) -> Tensor:
    """``base + sum of x * y``, rounded once; as many terms as ``base`` has."""
    terms = base.shape[0]
    if terms == 1:
        for x, y in pairs:
            base = base + x * y
        return base
    if terms == 2:
        head, tail = _two_prod_wide(*pairs[0], method)
        for pair in pairs[1:]:
            p, error = _two_prod_wide(*pair, method)
            head, e = two_sum(head, p)
            tail = tail + (error + e)
        return add(base, torch.stack(two_sum(head, tail)))
    levels = [[each] for each in base.unsqueeze(1)] + [[]]
    for x, y in pairs:
        x, y = x.unsqueeze(1), y.unsqueeze(1)
        for level, products in zip(
            levels, _partial_products(x, y, terms, method), strict=True
        ):
            level += products
    return distill(levels, terms)


def add_to_float(a: Tensor, b: Tensor) -> Tensor:
    """``a + b`` rounded to one float64, right to a few units also where it cancels.

    Leading components that cancel do so exactly, so the sums may run from the largest
    down and nothing needs to be renormalised.
    """
    s, e = two_sum(a.to(torch.float64), b.to(torch.float64))
    total = s[0]
    for i in range(1, s.shape[0]):
        total = total + (e[i - 1] + s[i])
    return total + e[-1]


def pad(x: Tensor, terms: int) -> Tensor:
    missing = terms - x.shape[0]
    if missing <= 0:
        return x[:terms]
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def reciprocal(x: Tensor, method: str) -> Tensor:
    """Newton: ``r <- r + r (1 - x r)`` doubles the good bits, ceil(log2 t) times."""
    r = x[:1].reciprocal()
    if x.shape[0] > 1:  # from one component to two, ordinary floats do
        p, e = _two_prod_wide(x[:2], r, method)
        r = torch.stack(fast_two_sum(r[0], r[0] * ((1 - p) - e)))
    while r.shape[0] < x.shape[0]:
        terms = min(2 * r.shape[0], x.shape[0])
        r = _newton_step(r, _one_minus(x[:terms], r, r.shape[0], method), terms, method)
    return r


def rsqrt(x: Tensor, method: str) -> Tensor:
    """Newton: ``r <- r + r (1 - x r^2) / 2``."""
    # torch.rsqrt is an estimate on some devices; 1/sqrt is rounded twice everywhere.
    r = x[:1].sqrt().reciprocal()
    if x.shape[0] > 1:
        square = torch.stack(two_prod(r[0], r[0], method=method))
        p, e = _two_prod_wide(x[:2], square, method)
        r = torch.stack(fast_two_sum(r[0], r[0] * ((1 - p) - e) * 0.5))
    return _refined_rsqrt(r, x, method)


def rsqrt_near_one(x: Tensor, method: str) -> Tensor:
    """:func:`rsqrt` where ``x`` is 1 up to a few roundings: the series is enough.

    ``1 + e/2 + 3 e^2/8`` of ``e = 1 - x`` is wrong by ``e^3``.
    """
    e = 1 - x[0]  # exact
    if x.shape[0] > 1:
        e = e - x[1]
    step = e * (0.5 + 0.375 * e)
    if x.shape[0] == 1:
        return (1 + step)[None]
    r = torch.stack(fast_two_sum(torch.ones_like(step), step))
    return _refined_rsqrt(r, x, method)


def _refined_rsqrt(r: Tensor, x: Tensor, method: str) -> Tensor:
    while r.shape[0] < x.shape[0]:
        terms = min(2 * r.shape[0], x.shape[0])
        square = mul(r, r, terms, method)
        residual = _one_minus(x[:terms], square, r.shape[0], method)
        r = _newton_step(r, residual * 0.5, terms, method)
    return r


def _newton_step(r: Tensor, residual: Tensor, terms: int, method: str) -> Tensor:
    step = mul(r, residual, r.shape[0], method)
    return add(pad(r, terms), pad(step, terms))


def _one_minus(x: Tensor, y: Tensor, kept: int, method: str) -> Tensor:
    """The ``kept`` leading terms of ``1 - x y``, all products summed exactly."""
    terms = x.shape[0]
    levels = _partial_products(-x.unsqueeze(1), y.unsqueeze(1), terms, method)
    levels[0].append(torch.ones_like(levels[0][0]))
    return distill(levels, terms, kept)
