"""What the low-rank optimisers share: groups, buckets, bases, refreshes, resume."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ._options import check_options
from .bases import SKETCHES, singular_basis

RefreshGrads = Callable[[list[Tensor]], Sequence[Tensor]]

_TINY = 1 << 14  # numbers in a bucket; below it a stacked copy is cheaper than a loop


@dataclass(eq=False)  # two buckets are the same only if they are one object
class _Bucket:
    """Parameters of one group that share shape, dtype, device and history.

    ``state`` maps a name to one stacked tensor (projected) or to a list (dense); entry
    i belongs to ``params[i]``, and ``optimizer.state[params[i]]`` holds views of it.
    """

    group: dict[str, Any]
    params: list[Tensor]
    indices: list[int]  # position among all parameters: part of a basis' seed
    state: dict[str, Tensor | list[Tensor]]
    step: int  # host copies of the counters, so that a step never waits for a device
    refreshes: int

    @property
    def is_left(self) -> bool:
        return _is_left(self.group, self.params[0])


class SubspaceOptimizer(Optimizer):
    """Base of :class:`GoLore` and :class:`GoLoreSGD`; not used directly.

    Parameters with the same shape live in one bucket, whose moments are one stacked
    tensor: the moment update is a handful of kernels per bucket. Per matrix a step is
    two thin products, the second of which (``addmm_``) projects back, scales, decays
    and updates the weight in place. No temporary has the weight's size (but buckets of
    at most 16 384 numbers are stacked, since there launches are what costs).
    """

    def __init__(
        self,
        params: Iterable,
        defaults: dict[str, Any],
        refresh_grads: RefreshGrads | None,
    ) -> None:
        if refresh_grads is not None and not callable(refresh_grads):
            raise TypeError(f"refresh_grads must be callable, got {refresh_grads!r}")
        self._refresh_grads = refresh_grads
        super().__init__(params, defaults)

    # What a subclass says about itself.

    def _moment_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        raise NotImplementedError

    def _check_group(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _dense_step(self, bucket: _Bucket) -> None:
        raise NotImplementedError

    def _projected_step(self, bucket: _Bucket) -> None:
        raise NotImplementedError

    # torch.optim.Optimizer's interface.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group and checks its options, as ``torch.optim`` does."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_options(group)
            self._check_group(group)
        except ValueError:
            self.param_groups.pop()
            raise
        self._buckets: list[_Bucket] | None = None  # stacked at the next step

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of every parameter that has a gradient.

        A parameter without a gradient is skipped and its refresh waits for it.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            The closure's loss, or None.

        Raises:
            ValueError: if a gradient that a singular basis is taken from is not
                finite (nothing has been changed then), or if a group's rank or side
                differs from its state. Elsewhere a non-finite gradient travels into
                the weights, as it does in ``torch.optim``.
            RuntimeError: if a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        active = self._active_buckets()
        self._refresh([b for b in active if _is_due(b)])
        for bucket in active:
            if bucket.group["rank"] is None:
                self._dense_step(bucket)
            else:
                self._projected_step(bucket)
                bucket.state["step"].add_(1)
            bucket.step += 1
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a saved state exactly, in the precision it was saved in.

        Raises:
            ValueError: if a group was saved with another ``rank`` or ``side``: its
                moments live in another space.
        """
        for number, (ours, saved) in enumerate(
            zip(self.param_groups, state_dict["param_groups"], strict=False)
        ):
            for key in ("rank", "side"):
                if ours[key] != saved.get(key):
                    raise ValueError(
                        f"group {number} was saved with {key}={saved.get(key)!r} but "
                        f"this optimizer has {key}={ours[key]!r}; its moments cannot "
                        "be carried over"
                    )
        super().load_state_dict(state_dict)
        # torch casts state to the parameter's dtype; the float32 moments of a bf16
        # weight would lose their digits, so put the saved values back.
        params = [p for group in self.param_groups for p in group["params"]]
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        for p, saved_id in zip(params, ids, strict=True):
            for name, value in state_dict["state"].get(saved_id, {}).items():
                self.state[p][name] = value.detach().to(p.device, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_refresh_grads": self._refresh_grads}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buckets = None  # stacked again from the per-parameter state when needed
        self.__dict__.setdefault("_refresh_grads", None)

    # Buckets.

    def _active_buckets(self) -> list[_Bucket]:
        if self._buckets is None:
            self._buckets = self._stack_known()
            self._unseen = [x for x in self._indexed() if not self.state.get(x[-1])]
        if self._unseen:
            self._stack_new()
        active = []
        for bucket in list(self._buckets):
            has_grad = [p.grad is not None for p in bucket.params]
            if all(has_grad):
                active.append(bucket)
            elif any(has_grad):
                active.append(self._split(bucket, has_grad))
        for bucket in active:
            if any(p.grad.layout is not torch.strided for p in bucket.params):
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients"
                )
            _check_unchanged(bucket)
        return active

    def _stack_known(self) -> list[_Bucket]:
        """Buckets of all parameters that have state (after loading or unpickling)."""
        members: dict[tuple, list[tuple[int, Tensor]]] = {}
        for number, group, index, p in self._indexed():
            if state := self.state.get(p):
                history = (int(state["step"]), int(state.get("refresh_count", 0)))
                key = (number, *_kind(group, p), *history)
                members.setdefault(key, []).append((index, p))
        return [
            self._stack(self.param_groups[key[0]], found, None, *key[-2:])
            for key, found in members.items()
        ]

    def _stack_new(self) -> None:
        """Buckets for the parameters that see their first gradient now."""
        members: dict[tuple, list[tuple[int, Tensor]]] = {}
        for number, group, index, p in self._unseen:
            if p.grad is not None:
                key = (number, *_kind(group, p))
                members.setdefault(key, []).append((index, p))
        self._unseen = [x for x in self._unseen if x[-1].grad is None]
        for key, found in members.items():
            group = self.param_groups[key[0]]
            zeros = self._zeros(group, [p for _, p in found])
            self._buckets.append(self._stack(group, found, zeros, 0, 0))

    def _indexed(self):
        index = 0
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                yield number, group, index, p
                index += 1

    def _zeros(self, group: dict[str, Any], params: list[Tensor]) -> dict[str, Any]:
        first, count = params[0], len(params)
        like = {"device": first.device, "dtype": _state_dtype(first)}
        state: dict[str, Any] = {"step": torch.zeros(count, device=first.device)}
        if group["rank"] is None:
            for name in self._moment_names(group):
                state[name] = [torch.zeros_like(p, dtype=like["dtype"]) for p in params]
            return state
        (m, n), rank, is_left = first.shape, group["rank"], _is_left(group, first)
        state["refresh_count"] = torch.zeros(
            count, dtype=torch.int64, device=first.device
        )
        state["basis"] = torch.zeros(count, m if is_left else n, rank, **like)
        for name in self._moment_names(group):
            shape = (rank, n) if is_left else (m, rank)
            state[name] = torch.zeros(count, *shape, **like)
        return state

    def _stack(self, group, found, stacked, step: int, refreshes: int) -> _Bucket:
        """Makes a bucket and points ``self.state`` at views of its tensors."""
        indices, params = [i for i, _ in found], [p for _, p in found]
        if stacked is None:
            names = self.state[params[0]].keys()
            stacked = {k: [self.state[p][k] for p in params] for k in names}
            for name, values in stacked.items():
                if group["rank"] is not None or name == "step":
                    stacked[name] = torch.stack(values)
        for i, p in enumerate(params):
            self.state[p] = {name: values[i] for name, values in stacked.items()}
        return _Bucket(group, params, indices, stacked, step, refreshes)

    def _split(self, bucket: _Bucket, has_grad: list[bool]) -> _Bucket:
        """Separates the parameters whose history goes on from those that wait."""
        self._buckets.remove(bucket)
        parts = []
        for wanted in (False, True):
            found = [
                (i, p)
                for i, p, has in zip(
                    bucket.indices, bucket.params, has_grad, strict=True
                )
                if has is wanted
            ]
            history = (bucket.step, bucket.refreshes)
            parts.append(self._stack(bucket.group, found, None, *history))
        self._buckets.extend(parts)
        return parts[1]

    # Bases.

    def _refresh(self, due: list[_Bucket]) -> None:
        """New bases, and the first moment carried into them.

        $M \\leftarrow P_{new}^T P_{old} M$ (left) or $M P_{old}^T P_{new}$ (right).
        """
        grads = self._basis_grads([b for b in due if not _is_random(b)])
        for bucket in due:
            group, old = bucket.group, bucket.state["basis"]
            new = torch.stack(
                [
                    self._basis(bucket, index, p, grads.get(p))
                    for index, p in zip(bucket.indices, bucket.params, strict=True)
                ]
            )
            if group["reproject"] and bucket.refreshes and self._moment_names(group):
                moment = bucket.state[self._moment_names(group)[0]]
                turn = new.mT @ old  # (k, r, r)
                moment.copy_(turn @ moment if bucket.is_left else moment @ turn.mT)
            old.copy_(new)
            bucket.refreshes += 1
            bucket.state["refresh_count"].add_(1)

    def _basis(
        self, bucket: _Bucket, index: int, p: Tensor, grad: Tensor | None
    ) -> Tensor:
        group, is_left = bucket.group, bucket.is_left
        generator = torch.Generator(p.device).manual_seed(
            _mix(group["seed"], index, bucket.refreshes)
        )
        if grad is None:
            return SKETCHES[group["sketch"]](
                p.shape[0] if is_left else p.shape[1],
                group["rank"],
                generator=generator,
                dtype=_state_dtype(p),
                device=p.device,
            )
        return singular_basis(
            (grad if is_left else grad.mT).to(_state_dtype(p)),
            group["rank"],
            method=group["projection"],
            generator=generator,
        )

    def _basis_grads(self, due: list[_Bucket]) -> dict[Tensor, Tensor]:
        """The gradients that singular bases are taken from, checked to be finite."""
        params = [p for bucket in due for p in bucket.params]
        if not params:
            return {}
        if self._refresh_grads is None:
            grads = [p.grad for p in params]
        else:
            with torch.enable_grad():
                grads = list(self._refresh_grads(params))
            shapes, wanted = [g.shape for g in grads], [p.shape for p in params]
            if shapes != wanted:
                raise ValueError(
                    "refresh_grads must return one gradient per parameter it was "
                    f"given, of shapes {wanted}; got {shapes}"
                )
        # The largest magnitude is finite exactly if every entry is, and costs no copy.
        peaks = [torch.linalg.vector_norm(g.detach(), math.inf) for g in grads]
        for p, peak in zip(params, peaks, strict=True):
            if not math.isfinite(peak):
                raise ValueError(
                    f"the gradient of {self._name(p)} is not finite at a refresh; "
                    "no singular basis can be taken from it (nothing was updated)"
                )
        return dict(zip(params, (g.detach() for g in grads), strict=True))

    def _name(self, wanted: Tensor) -> str:
        for number, group, index, p in self._indexed():
            if p is wanted:
                names = group.get("param_names")
                place = sum(len(g["params"]) for g in self.param_groups[:number])
                name = names[index - place] if names else index
                return f"parameter {name!r} {tuple(p.shape)}"
        raise KeyError(wanted)

    # The two thin products of a step.

    def _project(self, bucket: _Bucket) -> Tensor:
        """R = P^T G, (k, r, n), or R = G P, (k, m, r), for the whole bucket."""
        bases = bucket.state["basis"]
        if _is_tiny(bucket):
            grads = torch.stack([p.grad for p in bucket.params]).to(bases.dtype)
            return bases.mT @ grads if bucket.is_left else grads @ bases
        m, n = bucket.params[0].shape
        rank = bases.shape[-1]
        shape = (rank, n) if bucket.is_left else (m, rank)
        low = bases.new_empty(len(bucket.params), *shape)
        for p, basis, out in zip(bucket.params, bases, low, strict=True):
            a, b = (basis.mT, p.grad) if bucket.is_left else (p.grad, basis)
            if a.dtype == b.dtype == out.dtype:
                torch.mm(a, b, out=out)
            else:  # half-precision weights: cast the thin factor, not the gradient
                out.copy_(a.to(p.grad.dtype) @ b.to(p.grad.dtype))
        return low

    def _project_back(self, bucket: _Bucket, low: Tensor, lr: float) -> None:
        """X <- (1 - lr wd) X - lr scale (P N or N P^T), one fused product a matrix."""
        group, bases = bucket.group, bucket.state["basis"]
        decay = 1 - group["lr"] * group["weight_decay"]
        if _is_tiny(bucket):
            update = bases @ low if bucket.is_left else low @ bases.mT
            if decay != 1:
                torch._foreach_mul_(bucket.params, decay)
            torch._foreach_add_(bucket.params, list(update), alpha=-lr)
            return
        for p, basis, update in zip(bucket.params, bases, low, strict=True):
            a, b = (basis, update) if bucket.is_left else (update, basis.mT)
            p.addmm_(a.to(p.dtype), b.to(p.dtype), beta=decay, alpha=-lr)


def _is_due(bucket: _Bucket) -> bool:
    group = bucket.group
    return group["rank"] is not None and bucket.step % group["update_interval"] == 0


def _is_tiny(bucket: _Bucket) -> bool:
    """Launches cost more than arithmetic: stack the whole bucket into one product."""
    return len(bucket.params) * bucket.params[0].numel() <= _TINY


def _is_random(bucket: _Bucket) -> bool:
    switch = bucket.group["switch_step"]
    return switch is not None and bucket.step >= switch


def _is_left(group: dict[str, Any], p: Tensor) -> bool:
    if group["side"] == "auto":
        return p.shape[0] < p.shape[1]
    return group["side"] == "left"


def _state_dtype(p: Tensor) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def _kind(group: dict[str, Any], p: Tensor) -> tuple:
    shape = () if group["rank"] is None else tuple(p.shape)
    return (shape, p.dtype, p.device)


def _mix(seed: int, index: int, count: int) -> int:
    """A well-spread 32-bit seed: torch's CPU generator keeps only so many bits."""
    mask, z = (1 << 64) - 1, 0
    for value in (seed, index, count):  # SplitMix64, one round a number
        z = (z + value + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
    return z >> 32


def _check_unchanged(bucket: _Bucket) -> None:
    group = bucket.group
    if group["rank"] is None or "basis" not in bucket.state:
        same = (group["rank"] is None) == ("basis" not in bucket.state)
    else:
        p, basis = bucket.params[0], bucket.state["basis"]
        wanted = (p.shape[0] if bucket.is_left else p.shape[1], group["rank"])
        same = tuple(basis.shape[1:]) == wanted
    if not same:
        raise ValueError(
            f"rank or side of a group changed to rank={group['rank']}, "
            f"side={group['side']!r} while its state has another shape"
        )
