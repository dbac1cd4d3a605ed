"""One level of the construction, for all of its nodes at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from icml25.hsdte.expansion import Expansion

__all__ = ["carry_back", "compiled_steps", "mirror", "on_sphere"]


def mirror(v: Expansion) -> tuple[Expansion, Expansion, Expansion]:
    r"""The inversion that swaps each of ``k`` nodes and the origin.

    Args:
        v: ``(k, d)`` points of the ball, not the origin.

    Returns:
        Its centre $a = v/|v|^2$, ``(k, d)``; ``(k,)`` $|a|^2$ and $\rho^2 = |a|^2 - 1$.
    """
    inverse = v.dot(v).reciprocal()
    return v * inverse[:, None], inverse, inverse - 1


def on_sphere(u: Expansion, radius: Expansion) -> Expansion:
    """``(c, d)`` points around the origin: the children of the root.

    A direction may be wrong by 1e-16, a norm may not: it is divided out in expansions.
    """
    square = u.with_terms(radius.terms).dot(u)
    return (radius * square.rsqrt_near_one())[:, None] * u


def carry_back(
    u: Expansion,
    radius: Expansion,
    square: Expansion,
    center: Expansion,
    inverse: Expansion,
    rho2: Expansion,
) -> Expansion:
    r"""Children of any other node: around the origin, then where their parent is.

    With $z = r\,u/|u|$, the inversion gives $x = a + c\,(z - a)$ for
    $c = \rho^2/|z-a|^2$ and $|z-a|^2 = r^2 + |a|^2 - 2\,z\cdot a$. Children look away
    from the centre, so that this sum does not cancel; and ``c`` is small far out,
    so that only the last addition rounds at the size of ``x``.

    Args:
        u: ``(c, d)`` directions, of one term.
        radius, square: ``(c,)`` expansions of $r = \tanh(\tau w/2)$ and $r^2$.
        center, inverse, rho2: :func:`mirror` of each one's parent.

    Returns:
        ``(c, d)`` points.
    """
    both = torch.stack([u.with_terms(radius.terms).components, center.components], 1)
    dots = u[None].dot(Expansion(both, product=radius.product))  # u.u and u.a at once
    factor = radius * dots[0].rsqrt_near_one()  # z = factor * u
    distance = (square + inverse).add_products((factor, dots[1] * -2.0))
    c = rho2 * distance.reciprocal()
    return center.add_products((u, (c * factor)[:, None]), ((-c)[:, None], center))


@cache
def compiled_steps(
    dim: int, terms: int, dtype: torch.dtype, device: torch.device, product: str
) -> tuple[Callable[..., tuple[Expansion, ...]], Callable[..., Expansion]]:
    """:func:`mirror` and :func:`carry_back`, each fused by ``torch.compile``.

    A compiler that contracts ``a*b - c`` breaks error-free transformations without a
    word. So both are run on random nodes first and must repeat every bit of the
    uncompiled ones.

    Raises:
        RuntimeError: there is no working compiler, or the bits differ.
    """

    def fused(step: Callable[..., tuple[Expansion, ...]]) -> Callable:
        def run(*components: Tensor) -> tuple[Tensor, ...]:
            out = step(*(Expansion(c, product=product) for c in components))
            return tuple(e.components for e in out)

        graph = torch.compile(run, dynamic=True, fullgraph=True)

        def call(*given: Expansion) -> tuple[Expansion, ...]:
            # Copies, since the shape of what a view looks at would be guarded as well.
            components = [e.components.clone() for e in given]
            alone = components[0].shape[1] == 1  # a size of 1 would be a constant, too
            if alone:
                components = [c[:, [0, 0]] for c in components]
            for c in components:  # terms and dimension are constants of the graph
                torch._dynamo.mark_static(c, 0)
                if c.ndim == 3:
                    torch._dynamo.mark_static(c, 2)
            out = [c[:, :1] if alone else c for c in graph(*components)]
            return tuple(Expansion(c, product=product) for c in out)

        return call

    steps = fused(mirror), fused(lambda *given: (carry_back(*given),))
    # A number of nodes that is not the size of another axis.
    v, given = _random_level(1009, dim, terms, dtype, device, product)
    for step, plain, arguments in (
        (steps[0], mirror(v), (v,)),
        (steps[1], (carry_back(*given),), given),
    ):
        try:
            found = step(*arguments)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise RuntimeError(
                f"compiled=True: torch.compile failed on {device}; it needs a C++ "
                "compiler such as g++ on the CPU, Triton on a GPU. Mend that or leave "
                f"out compiled=True. It says: {reason}"
            ) from error
        for a, b in zip(plain, found, strict=True):
            if not torch.equal(a.components, b.components):
                raise RuntimeError(
                    f"compiled=True: the compiler for {device} changes the arithmetic "
                    f"of {terms} terms of {dtype}; leave out compiled=True"
                )
    return steps[0], lambda *given: steps[1](*given)[0]


def _random_level(
    count: int,
    dim: int,
    terms: int,
    dtype: torch.dtype,
    device: torch.device,
    product: str,
) -> tuple[Expansion, tuple[Expansion, ...]]:
    """Nodes, and the arguments of :func:`carry_back` for one child of each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, count, dim, generator=generator, dtype=torch.float64)
    x = (x / x.norm(dim=-1, keepdim=True)).to(dtype).to(device)
    u, v = (Expansion(each[None], product=product) for each in x)
    height = 0.1 + 0.8 * torch.rand(2, count, generator=generator, dtype=torch.float64)
    r, s = (Expansion.from_float(h.to(dtype).to(device), terms) for h in height)
    r, s = (Expansion(e.components, product=product) for e in (r / 3.0 * 3.0, s / 3.0))
    v = s[:, None] * v
    return v, (u, r, r * r, *mirror(v))


def direction(
    x: Expansion, center: Expansion, inverse: Expansion, rho2: Expansion
) -> Tensor:
    """Unit vectors towards ``sigma(x)``; after ``x - a`` ordinary floats are enough."""
    away = x.minus_as_float(center)
    factor = rho2.to_float(torch.float64) / away.square().sum(-1)
    image = center.to_float(torch.float64) + factor[:, None] * away
    return image / image.norm(dim=-1, keepdim=True)


def aligned(unit: Tensor, first: Tensor, up: Tensor, owner: Tensor) -> Tensor:
    """Reflect each node's directions so that its first one points up to the parent."""
    normal = up - first
    square = normal.square().sum(-1, keepdim=True)
    # The identity where the normal is noise.
    scaled = torch.where(square > 1e-24, 2 / square, 0.0) * normal
    return _reflect(unit, normal[owner], scaled[owner])


def twisted(
    first: Tensor, unit: Tensor, normal: Tensor, owner: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply each node's own random orthogonal matrix, a product of reflections."""
    count = len(first)
    owner = torch.cat([torch.arange(count, device=owner.device), owner])
    scaled = 2 * normal / normal.square().sum(-1, keepdim=True)
    x = torch.cat([first, unit])
    for n, m in zip(normal[owner].unbind(1), scaled[owner].unbind(1), strict=True):
        x = _reflect(x, n, m)
    return x[:count], x[count:]


def _reflect(x: Tensor, normal: Tensor, scaled: Tensor) -> Tensor:
    """Householder: ``x - 2 (x.n) n / |n|^2``."""
    return x - (x * normal).sum(-1, keepdim=True) * scaled
