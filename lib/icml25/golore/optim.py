"""GoLore as ``torch.optim`` optimisers: AdamW and SGD with momentum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ._subspace import RefreshGrads, SubspaceOptimizer, _Bucket


class GoLore(SubspaceOptimizer):
    r"""AdamW whose moments live in a low-rank subspace: GaLore first, GoLore last.

    Every ``update_interval`` steps each weight $X$ ($m \times n$) gets a new basis
    $P$ ($m \times r$): the top singular vectors of its gradient before
    ``switch_step``, a random one from there on. In between, with $R_t = P^\top G_t$,

    $$M \leftarrow \beta_1 M + (1-\beta_1) R_t,\quad
      V \leftarrow \beta_2 V + (1-\beta_2) R_t^2,\quad
      X \leftarrow (1 - \eta\lambda) X
        - \eta\alpha P \frac{\hat M}{\sqrt{\hat V} + \epsilon}.$$

    At a refresh the first moment is carried over, $M \leftarrow P_{new}^\top P M$; the
    second is kept as it is, as in the paper. On the right side ($n \le m$ under
    ``side="auto"``) all of this is transposed.

    Args:
        params: parameters, named parameters or groups. A group with ``rank=None``
            gets torch's own (fused) AdamW; see :func:`split_param_groups`.
        lr: step size $\eta$.
        switch_step: first step of the random phase. ``int(0.8 * num_steps)`` is the
            paper's GoLore\@20%, 0 is GoLore throughout, None is GaLore throughout.
            It has no default because it decides which algorithm runs.
        rank: $r$, 1 <= r <= min(m, n).
        update_interval: $\tau$, steps between refreshes.
        scale: $\alpha$, multiplies the projected update (not the decay).
        betas: decay rates of both moments.
        eps: added to $\sqrt{\hat V}$ after bias correction, torch's convention.
        weight_decay: $\lambda$, decoupled.
        projection: ``"svd"`` (the paper's) or ``"rsvd"``, the default: nearly the
            same subspace at a fraction of the time, see :func:`singular_basis`.
        sketch: law of the random basis: ``"haar"`` (the paper's), ``"coordinate"`` or
            ``"hadamard"``.
        side: ``"left"``, ``"right"``, or ``"auto"`` (the short side; square: right).
        reproject: carry the first moment over at a refresh.
        seed: bases depend only on (seed, position of the parameter, number of its
            refresh), so that replicas agree without communication.
        refresh_grads: called with the list of parameters whose singular basis is due,
            returns their gradients for it, for instance from a larger batch. None
            takes the step's own gradients. A copy or pickle of the optimiser carries
            it; ``state_dict`` does not.

    Raises:
        ValueError: for an option out of range, a parameter that is not real floating
            point, or one in a group with a rank that is not a matrix or is smaller
            than the rank.

    Notes:
        State per matrix: $mr + 2rn$ numbers (left), float32 for half-precision
        weights. A step costs $4mnr + O(rn)$; a random refresh $O(mr^2)$. The defaults
        are those of the authors' LLaMA-60M script, except ``projection``, for speed.
        State holds tensors only: it survives ``torch.save`` and
        ``torch.load(weights_only=True)`` and resumes bit-exactly, unless a parameter
        had missed a gradient: loading groups the parameters anew by their number of
        steps, which may change the order of a summation and so the last digit.

    Example:
        >>> groups = split_param_groups(model)
        >>> optimizer = GoLore(groups, lr=1e-3, rank=128, switch_step=8_000)
        >>> scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)

    Source: Algorithm 1 (with AdamW) of He et al., ICML 2025.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        *,
        switch_step: int | None,
        rank: int | None = 128,
        update_interval: int = 200,
        scale: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        projection: str = "rsvd",
        sketch: str = "haar",
        side: str = "auto",
        reproject: bool = True,
        seed: int = 0,
        refresh_grads: RefreshGrads | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "switch_step": switch_step,
            "rank": rank,
            "update_interval": update_interval,
            "scale": scale,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "projection": projection,
            "sketch": sketch,
            "side": side,
            "reproject": reproject,
            "seed": seed,
        }
        super().__init__(params, defaults, refresh_grads)

    def _moment_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _check_group(self, group: dict[str, Any]) -> None:
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ValueError(f"betas must be two numbers, got {betas!r}")
        if any(not 0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must lie in [0, 1), got {betas!r}")
        if not group["eps"] >= 0:
            raise ValueError(f"eps must be >= 0, got {group['eps']!r}")

    def _projected_step(self, bucket: _Bucket) -> None:
        group, (beta1, beta2) = bucket.group, bucket.group["betas"]
        correction1 = 1 - beta1 ** (bucket.step + 1)
        correction2 = 1 - beta2 ** (bucket.step + 1)
        exp_avg, exp_avg_sq = bucket.state["exp_avg"], bucket.state["exp_avg_sq"]
        low = self._project(bucket)
        exp_avg.lerp_(low, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(low, low, value=1 - beta2)
        # The gradient is spent: its buffer takes the update N = M / (sqrt(V) + eps).
        torch.sqrt(exp_avg_sq, out=low).mul_(correction2**-0.5).add_(group["eps"])
        torch.div(exp_avg, low, out=low)
        self._project_back(bucket, low, group["lr"] * group["scale"] / correction1)

    def _dense_step(self, bucket: _Bucket) -> None:
        group, state, params = bucket.group, bucket.state, bucket.params
        is_half = params[0].dtype not in (torch.float32, torch.float64)
        weights = [p.float() for p in params] if is_half else params
        grads = [p.grad.to(w.dtype) for p, w in zip(params, weights, strict=True)]
        # torch's fused kernel walks raw memory; anything strided takes the other path.
        is_plain = all(t.is_contiguous() for t in (*weights, *grads))
        adamw(
            weights,
            grads,
            state["exp_avg"],
            state["exp_avg_sq"],
            [],
            list(state["step"]),
            fused=is_plain,
            foreach=not is_plain,
            # the counters live with the weights, so that no step waits for a device
            capturable=params[0].device.type != "cpu" and not is_plain,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if is_half:
            torch._foreach_copy_(params, weights)


class GoLoreSGD(SubspaceOptimizer):
    r"""SGD with momentum in a low-rank subspace: the algorithm of the theorems.

    Bases, refreshes and groups as in :class:`GoLore`; in between

    $$M \leftarrow \mu M + (1-d) P^\top G_t,\quad
      X \leftarrow (1 - \eta\lambda) X - \eta\alpha P M.$$

    Args:
        params: parameters, named parameters or groups (``rank=None``: plain SGD).
        lr: step size $\eta$.
        switch_step: as in :class:`GoLore`.
        rank: as in :class:`GoLore`.
        update_interval: $\tau$.
        scale: $\alpha$.
        momentum: $\mu$. With 0 no moment is stored.
        dampening: $d$. None takes ``momentum``: the paper's moving average with
            $\beta_1 = 1 - \mu$; 0 is the heavy ball, a $1/(1-\mu)$ times larger
            step. The first gradient enters undamped, as in ``torch.optim.SGD``.
        weight_decay: $\lambda$, decoupled (unlike ``torch.optim.SGD``), since a
            penalty inside the gradient would be projected away.
        projection: as in :class:`GoLore`.
        sketch: as in :class:`GoLore`.
        side: as in :class:`GoLore`.
        reproject: as in :class:`GoLore`.
        seed: as in :class:`GoLore`.
        refresh_grads: as in :class:`GoLore`.

    Raises:
        ValueError: as :class:`GoLore`.

    Notes:
        With rank = min(m, n) the trajectory is that of ``torch.optim.SGD`` for any
        basis, since then $P P^\top = I$. State per matrix: $mr + rn$ numbers.

    Source: Algorithm 1 (with momentum SGD) of He et al., ICML 2025.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        *,
        switch_step: int | None,
        rank: int | None = 128,
        update_interval: int = 200,
        scale: float = 1.0,
        momentum: float = 0.9,
        dampening: float | None = None,
        weight_decay: float = 0.0,
        projection: str = "rsvd",
        sketch: str = "haar",
        side: str = "auto",
        reproject: bool = True,
        seed: int = 0,
        refresh_grads: RefreshGrads | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "switch_step": switch_step,
            "rank": rank,
            "update_interval": update_interval,
            "scale": scale,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "projection": projection,
            "sketch": sketch,
            "side": side,
            "reproject": reproject,
            "seed": seed,
        }
        super().__init__(params, defaults, refresh_grads)

    def _moment_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def _check_group(self, group: dict[str, Any]) -> None:
        if group["dampening"] is None:
            group["dampening"] = group["momentum"]
        for key in ("momentum", "dampening"):
            if not 0 <= group[key] < 1:
                raise ValueError(f"{key} must lie in [0, 1), got {group[key]!r}")

    def _projected_step(self, bucket: _Bucket) -> None:
        group = bucket.group
        update = self._project(bucket)
        if group["momentum"]:
            buffer = bucket.state["momentum_buffer"]
            (update,) = self._average([buffer], [update], bucket)
        self._project_back(bucket, update, group["lr"] * group["scale"])

    def _dense_step(self, bucket: _Bucket) -> None:
        group, params = bucket.group, bucket.params
        updates = [p.grad for p in params]
        if group["momentum"]:
            updates = self._average(bucket.state["momentum_buffer"], updates, bucket)
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, updates, alpha=-group["lr"])
        bucket.state["step"].add_(1)

    @staticmethod
    def _average(
        buffers: list[Tensor], grads: list[Tensor], bucket: _Bucket
    ) -> list[Tensor]:
        if bucket.step == 0:
            torch._foreach_copy_(buffers, grads)
        else:
            torch._foreach_mul_(buffers, bucket.group["momentum"])
            torch._foreach_add_(buffers, grads, alpha=1 - bucket.group["dampening"])
        return buffers


def split_param_groups(
    model: nn.Module, *, include: Sequence[str] = ("attn", "mlp")
) -> list[dict[str, Any]]:
    """Two groups for :class:`GoLore`: matrices to project, and the rest as dense.

    Args:
        model: any module; frozen parameters are left out.
        include: a ``nn.Linear`` weight is projected if the module's qualified name
            contains one of these (the paper's choice for Llama models).

    Returns:
        ``[{"params": projected}, {"params": dense, "rank": None}]`` with named
        parameters.

    Raises:
        TypeError: if ``include`` is one text instead of a sequence of them.
        ValueError: if no weight matches ``include``.
    """
    if isinstance(include, str):
        raise TypeError(f"include must be a sequence of names, got {include!r}")
    chosen = {
        id(module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(part in name for part in include)
    }
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    projected = [(n, p) for n, p in named if id(p) in chosen]
    dense = [(n, p) for n, p in named if id(p) not in chosen]
    if not projected:
        raise ValueError(
            f"include={tuple(include)} matches no nn.Linear of {type(model).__name__}"
        )
    groups: list[dict[str, Any]] = [{"params": projected}]
    return groups + ([{"params": dense, "rank": None}] if dense else [])
