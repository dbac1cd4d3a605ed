"""The counterexample's mechanism on real data: digits with unpredictable outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from icml25.core import make_generator, progress

from .optim import GoLoreSGD


@dataclass(frozen=True)
class DigitsConfig:
    """A linear classifier of scikit-learn's digits, with side outputs to predict."""

    num_side: int = 4  # side outputs whose targets are pure noise
    side_std: float = 3.0  # their standard deviation; 0 is the control
    batch_size: int = 16
    rank: int = 4  # of 14 rows
    update_interval: int = 100  # tau; the paper pre-trains with 200
    lr: float = 0.5  # cosine to 0
    num_steps: int = 4_000
    num_train: int = 1_400  # of 1797 images; the rest tests
    refresh_repeats: int = 8  # large batch: the training set this many times
    num_replicas: int = 3  # splits, mini-batches and bases, run at once


LAPTOP = DigitsConfig()
PAPER = DigitsConfig(num_steps=12_000, num_replicas=8)

_SHARES = {"golore@100": 0.0, "golore@50": 0.5, "golore@20": 0.8}


class _Digits:
    """Replicas of the data: own splits, shared by all runs of a replica."""

    def __init__(
        self, config: DigitsConfig, device: torch.device | str, generator
    ) -> None:
        from sklearn.datasets import load_digits

        pixels, label = load_digits(return_X_y=True)
        pixels = torch.from_numpy(pixels).float()
        pixels = (pixels - pixels.mean(0)) / pixels.std(0).clamp(min=1e-6)
        pixels /= 8  # 64 pixels of unit variance: a feature vector of norm near 1
        label = torch.from_numpy(label)
        order = torch.stack(
            [
                torch.randperm(len(label), generator=generator)
                for _ in range(config.num_replicas)
            ]
        )
        train, test = order[:, : config.num_train], order[:, config.num_train :]
        score = torch.nn.functional.one_hot(label, 10).float() - 0.1  # centred
        target = torch.nn.functional.pad(score, (0, config.num_side))
        self.x, self.y = pixels[train].to(device), target[train].to(device)  # (R, N, .)
        self.x_test, self.label_test = pixels[test].to(device), label[test].to(device)

    def grad(self, weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Of half the mean squared error: weight (..., R, 14, 64) -> same."""
        residual = x @ weight.mT - y  # (..., R, batch, 14)
        return residual.mT @ x / x.shape[-2]


def run_digits(
    config: DigitsConfig = LAPTOP, *, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, Any]:
    """Accuracy of the ten class outputs, with noisy side outputs and without.

    All runs of a replica see the same images and the same noise. ``weight`` is
    14 x 64 and starts at 0; the gradient of the side outputs is pure noise, and the
    larger part of every stochastic gradient.

    Args:
        config: sizes.
        device: where to run.
        seed: of splits, mini-batches, noise and bases.

    Returns:
        For ``noisy`` and ``control`` a dict from run (``full``, ``galore``,
        ``large batch``, ``golore@100``, ``golore@50``, ``golore@20``) to ``accuracy``,
        ``loss`` and ``grad`` (loss and squared gradient of the class outputs on the
        training set): one number a replica.
    """
    generator = make_generator(seed)
    data = _Digits(config, device, generator)
    names = ["full", "galore", "large batch", *_SHARES]
    sides = {"noisy": config.side_std, "control": 0.0}
    replicas, num_out = config.num_replicas, 10 + config.num_side
    # (runs, 2 sides, R, 14, 64): parameters and gradients are views of these.
    weight = torch.zeros(len(names), 2, replicas, num_out, 64, device=device)
    grads = torch.zeros_like(weight)
    deviation = torch.tensor(list(sides.values()), device=device)
    deviation = deviation.view(2, 1, 1, 1)

    def large_batch(params: list[Tensor]) -> list[Tensor]:
        del params  # both sides and all replicas, in this order
        # The mean of several noisy targets per image has this much less noise.
        noise = torch.randn(*data.y.shape[:2], config.num_side, generator=generator)
        noise = noise.to(device) / math.sqrt(config.refresh_repeats)
        y = data.y.expand(2, *data.y.shape).clone()
        y[..., 10:] += noise * deviation
        return list(data.grad(weight[2], data.x, y).flatten(0, 1))

    optimizers, groups = [], []
    for i, name in enumerate(names):
        params = [torch.nn.Parameter(w) for w in weight[i].view(-1, num_out, 64)]
        for p, grad in zip(params, grads[i].view(-1, num_out, 64), strict=True):
            p.grad = grad
        share = _SHARES.get(name)
        group = {
            "params": params,
            "rank": None if name == "full" else config.rank,
            "switch_step": None if share is None else int(share * config.num_steps),
        }
        if name != "large batch":
            groups.append(group)
            continue
        optimizers.append(_optimizer([group], config, seed, large_batch))
    optimizers.append(_optimizer(groups, config, seed, None))
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(o, config.num_steps)
        for o in optimizers
    ]
    replica = torch.arange(replicas).unsqueeze(1)
    for _ in progress(range(config.num_steps), "digits"):
        batch = torch.randint(
            config.num_train, (replicas, config.batch_size), generator=generator
        )
        noise = torch.randn(
            replicas, config.batch_size, config.num_side, generator=generator
        )
        x = data.x[replica, batch]
        y = data.y[replica, batch].expand(2, -1, -1, -1).clone()
        y[..., 10:] += noise.to(device) * deviation
        grads.copy_(data.grad(weight, x, y))
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
    return _evaluate(data, weight, names, list(sides))


def _optimizer(groups, config: DigitsConfig, seed: int, refresh_grads) -> GoLoreSGD:
    return GoLoreSGD(
        groups,
        config.lr,
        switch_step=None,
        rank=config.rank,
        update_interval=config.update_interval,
        projection="svd",
        seed=seed,
        refresh_grads=refresh_grads,
    )


def _evaluate(data: _Digits, weight: Tensor, names, sides) -> dict[str, Any]:
    classes = weight[..., :10, :]
    hit = (data.x_test @ classes.mT).argmax(-1) == data.label_test
    residual = data.x @ classes.mT - data.y[..., :10]
    measured = {
        "accuracy": hit.float().mean(-1),
        "loss": 0.5 * residual.square().sum(-1).mean(-1),
        "grad": data.grad(classes, data.x, data.y[..., :10]).square().sum((-2, -1)),
    }  # each (runs, 2, R)
    return {
        side: {
            name: {key: value[i, s].tolist() for key, value in measured.items()}
            for i, name in enumerate(names)
        }
        for s, side in enumerate(sides)
    }
