"""What the page measures about the code: distance from the release, and cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from icml25.timefilter.model import TimeFilter, released_state


def load_released(case: Path) -> tuple[TimeFilter, dict[str, Tensor]]:
    """A released model, with its weights loaded, and the values recorded from it.

    Args:
        case: path without suffix of ``<case>.json`` (sizes) and ``<case>.npz``
            (arrays), as in ``tests/golden/timefilter``.
    """
    sizes = json.loads(case.with_suffix(".json").read_text())
    with np.load(case.with_suffix(".npz")) as file:
        arrays = {name: torch.from_numpy(np.asarray(file[name])) for name in file}
    model = TimeFilter(
        sizes["c"],
        sizes["seq_len"],
        sizes["pred_len"],
        patch_len=sizes["patch_len"],
        dim=sizes["d_model"],
        dim_ff=sizes["d_ff"],
        num_heads=sizes["n_heads"],
        num_layers=sizes["e_layers"],
        alpha=sizes["alpha"],
        top_p=sizes["top_p"],
        positional=bool(sizes["pos"]),
    )
    weights = {k[2:]: v for k, v in arrays.items() if k.startswith("w/")}
    model.load_state_dict(released_state(weights, model), strict=True)
    return model, arrays


def released_gaps(case: Path, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """How far a released model's forecasts, losses and gradients are from ours.

    Forecasts and losses: the largest difference, relative to the size of what it is
    compared with, or to one where that is smaller. Gradient: that of all parameters is
    one vector; the length of the difference relative to its length.

    Args:
        case: as in :func:`load_released`.
        dtype: what ours are computed in; the released values are float32.
    """
    model, arrays = load_released(case)
    model.to(dtype)
    x, y = arrays["x"].to(dtype), arrays["y"].to(dtype)
    evaluated = model.eval()(x)
    noise = [
        arrays[name].to(dtype).unflatten(0, (-1, model.blocks[0].graph.num_heads))
        for name in sorted(arrays)
        if name.startswith("train/noise_")
    ]
    trained = model.train()(x, noise or None)
    loss = F.mse_loss(trained.y, y) + 0.05 * trained.routing_loss
    loss.backward()
    gradients = {k[5:]: v for k, v in arrays.items() if k.startswith("grad/")}
    gradients = released_state(gradients, model)
    names, ours = zip(*model.named_parameters(), strict=True)
    ours = torch.cat([parameter.grad.flatten() for parameter in ours]).double()
    theirs = torch.cat([gradients[name].flatten() for name in names]).double()
    return {
        "forecast": max(
            _gap(evaluated.y, arrays["eval/out"]), _gap(trained.y, arrays["train/out"])
        ),
        "loss": max(
            _gap(evaluated.routing_loss, arrays["eval/moe_loss"]),
            _gap(loss, arrays["train/loss"]),
        ),
        "gradient": ((ours - theirs).norm() / theirs.norm()).item(),
    }


def _gap(ours: Tensor, theirs: Tensor) -> float:
    size = max(1.0, theirs.abs().max().item())
    return (ours.detach() - theirs).abs().max().item() / size


def cost(forward: Callable[[], Tensor], *, repeats: int = 3) -> tuple[float, int]:
    """Processor seconds of a forward and backward pass; bytes kept between the two.

    Args:
        forward: computes a scalar.
        repeats: the quickest of so many passes counts.
    """
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    seconds = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        forward().backward()
        seconds = min(seconds, time.process_time() - begin)
    return seconds, sum(kept.values())
