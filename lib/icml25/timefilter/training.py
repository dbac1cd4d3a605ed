"""One way of training and scoring for every model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from icml25.core import progress
from icml25.timefilter.graph import REGIONS
from icml25.timefilter.linear import LINEAR
from icml25.timefilter.model import TimeFilter
from icml25.timefilter.released import Config
from icml25.timefilter.series import Split, sliding_windows


def build(name: str, config: Config, channels: int) -> nn.Module:
    """A model by name.

    Args:
        name: ``"routed"`` (as released), ``"repaired"`` (removal before the softmax,
            gates trained by the forecast), a union of regions such as ``"T"`` (channels
            alone), ``"S+T"`` or ``"S+T+ST"`` (all mixed), or ``"DLinear"``,
            ``"NLinear"``, ``"RLinear"``.
        config: sizes.
        channels: of the series.

    Raises:
        ValueError: an unknown name.
    """
    if name in LINEAR:
        return LINEAR[name](config.lookback, config.horizon)
    options: dict[str, Any] = {"mask": config.mask}
    if name == "routed":
        options = {}
    elif name == "repaired":
        options = {"router": "repaired", "mask": "minus_inf"}
    else:
        options["filter"] = tuple(name.split("+"))
        if unknown := [part for part in options["filter"] if part not in REGIONS]:
            raise ValueError(
                f"model {name!r}: {unknown[0]!r} is neither a region (S, T, ST) nor "
                f"one of routed, repaired, {', '.join(LINEAR)}"
            )
    return TimeFilter(
        channels,
        config.lookback,
        config.horizon,
        patch_len=config.patch_len,
        dim=config.dim,
        dim_ff=config.dim_ff,
        num_heads=config.num_heads,
        num_layers=config.num_layers,
        alpha=config.alpha,
        top_p=config.top_p,
        positional=config.positional,
        dropout=config.dropout,
        **options,
    )


@torch.no_grad()
def predict(model: nn.Module, rows: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """Forecasts and truth for every window of ``rows``: two ``(W, S, C)``."""
    model.eval()
    windows = sliding_windows(rows, config.lookback, config.horizon)
    batches = windows.split(max(1, 2048 // windows.shape[2]))
    found = [model(batch[:, : config.lookback]).y for batch in batches]
    return torch.cat(found), windows[:, config.lookback :]


def score(model: nn.Module, rows: Tensor, config: Config) -> dict[str, float]:
    """MSE and MAE over all windows, steps and channels of ``rows``."""
    forecast, truth = predict(model, rows, config)
    error = forecast - truth
    return {
        "mse": error.square().mean().item(),
        "mae": error.abs().mean().item(),
    }


@dataclass(frozen=True)
class Trained:
    """A trained model (last epoch) and how it got there.

    Attributes:
        model: in evaluation mode.
        val: validation MSE after each epoch.
        last, best: test MSE and MAE after the last epoch (what the release reports)
            and after the epoch with the lowest validation error.
        gates: for a routed model, per epoch the share of (token, head) that listens to
            S, T, ST, over layers and validation windows; before training first.
        mixed: likewise, the share of tokens whose choice is not the commonest one.
    """

    model: nn.Module
    val: list[float]
    last: dict[str, float]
    best: dict[str, float]
    gates: list[list[float]]
    mixed: list[float]


def train(name: str, split: Split, config: Config, *, seed: int) -> Trained:
    """Train one model; the caller's random state is left as it was.

    Adam on the squared error plus the routing loss, learning rate falling over half a
    cosine by epoch, batches drawn without replacement.

    Raises:
        ValueError: an unknown model, or windows that do not fit.
    """
    device = split.train.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        model = build(name, config, split.train.shape[1]).to(device)
        return _train(model, split, config, name)


def _train(model: nn.Module, split: Split, config: Config, name: str) -> Trained:
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    windows = sliding_windows(split.train, config.lookback, config.horizon)
    windows = windows[:: config.stride]
    val: list[float] = []
    best: dict[str, float] = {}
    gates, mixed = _gate_shares(model, split, config, [], [])
    steps = math.ceil(len(windows) / config.batch_size)
    with progress(desc=name, total=steps * config.epochs, unit="step") as bar:
        for epoch in range(config.epochs):
            for group in optimizer.param_groups:
                share = epoch / config.epochs
                group["lr"] = config.lr / 2 * (1 + math.cos(math.pi * share))
            model.train()
            order = torch.randperm(len(windows), device=windows.device)
            for chosen in order.split(config.batch_size):
                batch = windows[chosen]
                forecast = model(batch[:, : config.lookback])
                error = (forecast.y - batch[:, config.lookback :]).square().mean()
                loss = error + config.routing_weight * forecast.routing_loss
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                bar.update()
            val.append(score(model, split.val, config)["mse"])
            if val[-1] == min(val):
                best = score(model, split.test, config)
            gates, mixed = _gate_shares(model, split, config, gates, mixed)
    last = best if val[-1] == min(val) else score(model, split.test, config)
    return Trained(model.eval(), val, last, best, gates, mixed)


@torch.no_grad()
def routing_choices(model: TimeFilter, rows: Tensor, config: Config) -> Tensor | None:
    """Gates of validation windows, ``(layers, W, H, L, 3)``; ``None`` if not routed."""
    if not isinstance(model, TimeFilter) or model.blocks[0].graph.router is None:
        return None
    model.eval()
    windows = sliding_windows(rows, config.lookback, config.horizon)
    # Every tenth window, at most 32: neighbouring windows are nearly the same.
    return torch.stack(model(windows[::10][:32, : config.lookback]).gates)


def _gate_shares(model, split, config, gates, mixed):
    choices = routing_choices(model, split.val, config)
    if choices is None:
        return gates, mixed
    codes = (choices.round().long() * choices.new_tensor([1, 2, 4]).long()).sum(-1)
    commonest = torch.stack(
        [torch.bincount(layer.flatten(), minlength=8).max() for layer in codes]
    )
    apart = 1 - commonest.sum().item() / codes.numel()
    return gates + [choices.mean((0, 1, 2, 3)).tolist()], mixed + [apart]
