"""The counterexample with its closed forms, the proved bound, and state sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

LAWS = ("blocked", "isotropic")


class StallProblem:
    r"""The quadratic on which GaLore stalls: signal and noise share no direction.

    $$f(X) = \tfrac12 \|A X\|_F^2 + \langle B, X\rangle,\quad
      A = [I_{n-r}\; 0],\quad B = \begin{pmatrix} D & 0\\ 0 & 0\end{pmatrix},$$

    with gradient noise $\pm\sigma$ on the lower right $r \times r$ identity. With
    $S = X_{top} + [D\; 0]$: $f - f^* = \tfrac12\|S\|_F^2$ and
    $\|\nabla f\|_F^2 = \|S\|_F^2$. While the upper right block of $X$ is zero, as it is
    at the start and stays under GaLore, signal and noise share no row and no column:
    the singular values of a noisy gradient are those of $S$ and $r$ copies of
    $\sigma$. A singular basis then follows a component of $S$ only while it exceeds
    $\sigma$.

    Args:
        n: matrices are $n \times n$.
        rank: $r$, the number of noise directions, 1 <= r < n.
        sigma: $\sigma$ > 0, the noise level and the scale of $D$ and of the start.
        generator: draws $D$ and the lower rows of the start. Seed 42 on the CPU gives
            the instance of the paper's first figure.
        dtype: of all tensors; draws are made in float32, as for that figure.

    Attributes:
        start: $X_0$, shape (n, n); its upper right $(n-r) \times r$ block is zero.
        f_star: the minimum, $-\tfrac12\|D\|_F^2$.
        smoothness: $L = 1$.
        noise_power: $\nu^2 = E\|\xi\|_F^2 = r\sigma^2$, under both laws of the noise.

    Raises:
        ValueError: for ``rank`` or ``sigma`` out of range.

    Example:
        >>> problem = StallProblem(generator=torch.Generator().manual_seed(42))
        >>> round(problem.f_stall(problem.start).item(), 2)
        -20.78

    Source: the counterexample behind Figure 1; the stall level is our derivation.
    """

    smoothness = 1.0

    def __init__(
        self,
        n: int = 10,
        rank: int = 4,
        sigma: float = 1.0,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        if not 1 <= rank < n:
            raise ValueError(f"rank must be between 1 and n - 1 = {n - 1}, got {rank}")
        if not 0 < sigma < math.inf:
            raise ValueError(f"sigma must be finite and > 0, got {sigma}")
        self.n, self.rank, self.sigma = n, rank, sigma
        kept = n - rank
        device = generator.device if generator is not None else None
        draw = {"generator": generator, "device": device, "dtype": torch.float32}
        offset = sigma * torch.randn(kept, kept, **draw).to(dtype)  # D
        lower = sigma * torch.randn(rank, n, **draw).to(dtype)
        upper = torch.eye(kept, n, device=device, dtype=dtype) * (sigma / 2)
        self.start = torch.cat([upper, lower])
        self._offset = torch.nn.functional.pad(offset, (0, rank))  # [D 0], (n-r, n)
        self._block = torch.zeros(n, n, device=device, dtype=dtype)
        self._block[kept:, kept:] = torch.eye(rank, device=device, dtype=dtype)
        self.f_star = -0.5 * offset.square().sum().item()
        self.noise_power = rank * sigma**2

    def to(self, device: torch.device | str) -> StallProblem:
        """Moves the problem's tensors; returns itself."""
        for name in ("start", "_offset", "_block"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def signal(self, x: Tensor) -> Tensor:
        """$S$: the rows of the gradient that are not zero, (..., n - r, n)."""
        return x[..., : self.n - self.rank, :] + self._offset

    def loss(self, x: Tensor) -> Tensor:
        """$f(X)$ for (..., n, n), shape (...)."""
        return self.f_star + 0.5 * self.signal(x).square().sum((-2, -1))

    def grad(self, x: Tensor) -> Tensor:
        """The true gradient, (..., n, n)."""
        return torch.nn.functional.pad(self.signal(x), (0, 0, 0, self.rank))

    def noisy_grad(
        self,
        x: Tensor,
        *,
        generator: torch.Generator | None = None,
        num_samples: int = 1,
        law: str = "blocked",
    ) -> Tensor:
        r"""A mini-batch gradient, independent for every leading index.

        Args:
            x: $X$, (..., n, n).
            generator: source of the noise.
            num_samples: $\mathcal{B}$, batch size.
            law: ``"blocked"`` (the counterexample's) or ``"isotropic"`` (Gaussian
                entries of the same total power $r\sigma^2$).

        Returns:
            Shape (..., n, n).
        """
        if law not in LAWS:
            raise ValueError(f"law must be one of {LAWS}, got {law!r}")
        if num_samples < 1:
            raise ValueError(f"num_samples must be >= 1, got {num_samples}")
        like = {"generator": generator, "device": x.device, "dtype": x.dtype}
        grad = self.grad(x)
        if law == "isotropic":
            deviation = math.sqrt(self.noise_power / num_samples) / self.n
            return grad.add_(torch.randn(x.shape, **like), alpha=deviation)
        # The mean of the batch's signs, drawn as a binomial count.
        trials = x.new_full(x.shape[:-2], num_samples)
        heads = torch.binomial(trials, x.new_full((), 0.5).expand_as(trials), generator)
        mean = (2 * heads / num_samples - 1) * self.sigma
        return grad.addcmul_(mean[..., None, None], self._block)

    def f_stall(self, x: Tensor) -> Tensor:
        r"""Where gradient descent in GaLore's subspace stops, as $\eta\tau \to 0$.

        $f^* + \tfrac12 \sum_i \min(s_i(S), \sigma)^2$, for any subspace rank up to
        ``rank``. Where all $s_i < \sigma$ it holds for every step size and every
        optimiser without weight decay: $S$ cannot move.

        Args:
            x: $X$, (..., n, n), with a zero upper right block (else the noise shares
                columns with the signal, and drags it along).

        Returns:
            Shape (...).

        Raises:
            ValueError: if that block is not zero.
        """
        kept = self.n - self.rank
        # round-off of a basis may have leaked into it
        if x[..., :kept, kept:].abs().max() > 1e-6 * self.sigma:
            raise ValueError(
                f"x must be zero in its upper right block, x[:{kept}, {kept}:]; the "
                "stall level has a closed form only there"
            )
        values = torch.linalg.svdvals(self.signal(x)).clamp(max=self.sigma)
        return self.f_star + 0.5 * values.square().sum(-1)


def golore_lr(
    *,
    smoothness: float,
    gap: float,
    update_interval: int,
    num_steps: int,
    noise: float,
) -> float:
    r"""The step size that minimises the bound,
    $\min\{\frac{1}{4L\tau}, \sqrt{17\Delta / (12 L \nu_P^2 T)}\}$.

    Arguments as in :func:`golore_bound`.
    """
    largest = 1 / (4 * smoothness * update_interval)
    if noise == 0:
        return largest
    return min(largest, math.sqrt(17 * gap / (12 * smoothness * noise * num_steps)))


def golore_bound(
    *,
    smoothness: float,
    gap: float,
    delta: float,
    update_interval: int,
    num_steps: int,
    noise: float,
    lr: float | None = None,
) -> float:
    r"""What GoLore-SGD is proved to reach at standard batch size.

    For plain SGD in a uniform subspace that is drawn afresh, independently of the
    past, every $\tau$ steps, $\eta \le 1/(4L\tau)$ and $T$ a multiple of $\tau$
    (eq-bound in the book),

    $$\operatorname*{avg}_{k} E\|\nabla f(X_{k\tau})\|_F^2
      \le \frac{17\,\Delta}{7\,\delta\eta T} + \frac{12\,L\eta \nu_P^2}{7\,\delta}.$$

    Args:
        smoothness: $L$ > 0.
        gap: $\Delta = f(X_0) - \inf f$ >= 0.
        delta: $\delta = \min_l r_l / \min(m_l, n_l)$, in (0, 1].
        update_interval: $\tau$.
        num_steps: $T$, a multiple of $\tau$.
        noise: $\nu_P^2 \ge E\|P^\top\xi\|_F^2$, where $\nu^2 \ge E\|\xi\|_F^2$:
            $\delta\nu^2$ for noise that is independent of the basis, $\nu^2$ always.
        lr: $\eta$; None takes :func:`golore_lr`.

    Returns:
        The bound on the average over the refresh points.

    Raises:
        ValueError: outside the theorem's assumptions.

    Source: our own proof, for SGD without momentum (He et al. treat momentum).
    """
    known = {
        "smoothness": smoothness,
        "gap": gap,
        "delta": delta,
        "update_interval": update_interval,
        "num_steps": num_steps,
        "noise": noise,
    }
    for name, value in known.items():
        may_be_zero = name in ("gap", "noise")
        if not (value > 0 or (may_be_zero and value == 0)) or value == math.inf:
            allowed = ">= 0" if may_be_zero else "> 0"
            raise ValueError(f"{name} must be finite and {allowed}, got {value}")
    if delta > 1:
        raise ValueError(f"delta must be at most 1, got {delta}")
    if num_steps % update_interval:
        raise ValueError(
            f"num_steps must be a multiple of update_interval={update_interval}, "
            f"got {num_steps}"
        )
    if lr is None:
        del known["delta"]
        lr = golore_lr(**known)
    largest = 1 / (4 * smoothness * update_interval)
    if not 0 < lr <= largest * (1 + 1e-12):
        raise ValueError(f"lr must lie in (0, 1/(4 L tau)] = (0, {largest}], got {lr}")
    start = 17 * gap / (7 * delta * lr * num_steps)
    return start + 12 * smoothness * lr * noise / (7 * delta)


def state_numel(
    shapes: Iterable[tuple[int, ...]], *, rank: int | None, num_moments: int = 2
) -> int:
    r"""How many numbers an optimiser stores for parameters of these shapes.

    A projected $m \times n$ matrix needs $r(\min(m,n) + k \max(m,n))$ for $k$ moments:
    the basis, and moments of the projected gradient. A dense parameter needs $k$ times
    its size.

    Args:
        shapes: shapes of the parameters.
        rank: $r$, or None for dense.
        num_moments: $k$: 2 for AdamW, 1 for momentum SGD.

    Returns:
        Numbers, without the counters.

    Raises:
        ValueError: if a shape cannot be projected to ``rank``.
    """
    total = 0
    for shape in shapes:
        if rank is None:
            total += num_moments * math.prod(shape)
        elif len(shape) != 2 or not 1 <= rank <= min(shape):
            raise ValueError(
                f"rank={rank} does not fit a parameter of shape {tuple(shape)}: it "
                "must be a matrix with 1 <= rank <= min(m, n)"
            )
        else:
            total += rank * (min(shape) + num_moments * max(shape))
    return total


# hidden, intermediate, layers (untied embedding and head of 32 000 tokens)
_LLAMA = {
    "60M": (512, 1376, 8),
    "130M": (768, 2048, 12),
    "7B": (4096, 11008, 32),
}


def llama_shapes(
    name: str, *, vocab_size: int = 32_000
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Parameter shapes of the paper's Llama models: (projected, dense).

    Args:
        name: ``"60M"``, ``"130M"`` or ``"7B"``.
        vocab_size: tokens of the untied embedding and head.
    """
    if name not in _LLAMA:
        raise ValueError(f"name must be one of {tuple(_LLAMA)}, got {name!r}")
    hidden, intermediate, layers = _LLAMA[name]
    block = [(hidden, hidden)] * 4 + [(intermediate, hidden)] * 2
    projected = (block + [(hidden, intermediate)]) * layers
    dense = [(vocab_size, hidden)] * 2 + [(hidden,)] * (2 * layers + 1)
    return projected, dense
