"""The paper's training: CosFace over origins, for a matrix W or for networks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from icml25.core import progress

from .ranking import unit


class CosFaceHead(nn.Module):
    r"""Large-margin cosine logits over one centre an origin.

    $$\ell_{ij} = s\,\bigl(\cos(x_i, c_j) - m\,[j = y_i]\bigr)$$

    Args:
        dim: k, numbers a descriptor.
        num_classes: origins.
        scale: s.
        margin: m.
        generator: draws the centres (Xavier-uniform).

    Raises:
        ValueError: sizes below 1 and 2; a scale that is not positive; a margin outside
            [0, 2).

    Source: CosFace; s = 64 and m = 0.35 as in the released trainer.
    """

    def __init__(
        self,
        dim: int,
        num_classes: int,
        *,
        scale: float = 64.0,
        margin: float = 0.35,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if dim < 1 or num_classes < 2:
            raise ValueError(
                f"dim={dim}, num_classes={num_classes}: give at least 1 and 2"
            )
        if not (scale > 0 and 0 <= margin < 2):
            raise ValueError(
                f"scale={scale}, margin={margin}: give a positive scale and a margin "
                "in [0, 2)"
            )
        self.scale, self.margin = scale, margin
        self.centres = nn.Parameter(torch.empty(num_classes, dim))
        nn.init.xavier_uniform_(self.centres, generator=generator)

    def forward(
        self, x: Tensor, labels: Tensor, *, classes: Tensor | None = None
    ) -> Tensor:
        """Logits (N, C) of descriptors (N, k).

        Args:
            x: (N, k).
            labels: (N,) int64, origin of each row.
            classes: (C,) sorted origins to compare with, all labels among them: for
                class counts that do not fit. Default: all.

        Raises:
            ValueError: descriptors of another width; labels that are not one whole
                number a row, or, on the CPU, lie outside the classes. On a GPU and in
                a compiled call nothing waits for the values: ``scatter_`` finds such a
                label, by its own assertion.
        """
        centres, target = self.centres, labels
        is_cheap = labels.device.type == "cpu" and not torch.compiler.is_compiling()
        if x.dim() != 2 or x.shape[1] != centres.shape[1]:
            raise ValueError(f"x={tuple(x.shape)}: give (N, {centres.shape[1]})")
        fits = labels.dtype == torch.int64 and labels.shape == (len(x),) and len(x)
        if fits and is_cheap:
            fits = labels.min() >= 0 and labels.max() < len(centres)
        if not fits:
            raise ValueError(
                f"labels must lie in 0..{len(centres) - 1}, one (int64) for each row "
                "of x"
            )
        if classes is not None:
            target = torch.searchsorted(classes, labels).clamp(max=len(classes) - 1)
            # A label that is left out points past the last class.
            target = target.where(classes[target] == labels, len(classes))
            if is_cheap and target.max() == len(classes):
                raise ValueError("classes leave out some of the labels")
            centres = centres[classes]
        normalize = nn.functional.normalize
        cosine = normalize(x) @ normalize(centres).mT  # (N, C)
        margins = torch.zeros_like(cosine)
        margins.scatter_(1, target[:, None], self.margin)
        return self.scale * (cosine - margins)

    def loss(
        self, x: Tensor, labels: Tensor, *, classes: Tensor | None = None
    ) -> Tensor:
        """Mean cross-entropy of the logits."""
        target = labels
        logits = self(x, labels, classes=classes)
        if classes is not None:
            target = torch.searchsorted(classes, labels)
        return nn.functional.cross_entropy(logits, target)


@dataclass(frozen=True)
class CosFaceConfig:
    """Training of W or of a network on pairs."""

    num_steps: int = 200
    num_origins: int = 64  # origins in a batch, P
    num_images: int = 4  # images of each, K (the origin among them)
    lr: float = 3e-4  # of W
    centre_lr: float = 3e-3
    width: int = 0  # columns of W; 0: as many as the embedding has
    init: str = "identity"  # of W: "identity" (ours) or "default" (the paper's)
    num_layers: int = 1  # 1 is W; more: a plain network with ReLU
    hidden: int = 512  # width of its inner layers
    num_classes: int = 512  # centres compared with in a step; 0 compares with all
    ema: float = 0.99  # decay of the averaged weights


PAPER_COSFACE = CosFaceConfig(
    num_steps=50_000,
    num_origins=128,
    lr=3.5e-4,
    centre_lr=3.5e-4,
    width=512,
    init="default",
    hidden=4096,
    num_classes=0,
    ema=0.9999,
)


def paper_lr(epoch: int, *, base: float = 3.5e-4) -> float:
    """The released trainer's learning rate in one of its 25 epochs.

    Raises:
        ValueError: an epoch outside 0..24.
    """
    if not 0 <= epoch < 25:
        raise ValueError(f"epoch={epoch}: the schedule has epochs 0 to 24")
    if epoch < 5:
        return base * (0.99 * epoch / 5 + 0.01)
    if epoch < 10:
        return base
    return base * 0.5 * (1 + math.cos(math.pi * (epoch - 10) / 15))


def make_network(
    dim: int, config: CosFaceConfig, *, generator: torch.Generator | None = None
) -> nn.Sequential:
    """W as one ``Linear`` without bias, or the ablation's plain network in its place.

    Raises:
        ValueError: an unknown ``init``; identity with several layers.
    """
    width = config.width or dim
    if config.init not in ("identity", "default"):
        raise ValueError(f"init={config.init!r}: 'identity' or 'default'")
    if config.num_layers < 1 or (config.num_layers > 1 and config.init == "identity"):
        raise ValueError(
            f"num_layers={config.num_layers}, init={config.init!r}: give 1 layer or "
            "more, several with init='default'"
        )
    widths = [dim, *[config.hidden] * (config.num_layers - 1), width]
    layers: list[nn.Module] = []
    for place, (num_in, num_out) in enumerate(zip(widths, widths[1:], strict=False)):
        linear = nn.Linear(num_in, num_out, bias=place < config.num_layers - 1)
        bound = num_in**-0.5  # torch's own law, drawn from the generator
        with torch.no_grad():
            for p in linear.parameters():
                p.uniform_(-bound, bound, generator=generator)
            if config.init == "identity":
                linear.weight.copy_(torch.eye(num_out, num_in))
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train_cosface(
    z_origin: Tensor,
    z_gen: Tensor,
    origin_of: Tensor,
    *,
    config: CosFaceConfig | None = None,
    network: nn.Module | None = None,
    generator: torch.Generator | None = None,
    desc: str = "CosFace",
) -> tuple[nn.Module, list[float]]:
    """Train W (or a plain network) by classifying images by their origin.

    Args:
        z_origin: (C, d) embeddings of the origins, one a class, centred.
        z_gen: (n, d) embeddings of translations, centred alike.
        origin_of: (n,) int64, the origin of each translation.
        config: sizes; the paper's are ``PAPER_COSFACE``.
        network: trained in place of W, (n, d) to (n, ``config.width``).
        generator: draws initial weights and batches, on the CPU.
        desc: label of the progress bar.

    Returns:
        The network with averaged weights, and the loss of every step.

    Raises:
        ValueError: shapes that do not fit; origins outside the classes; NaN; no step;
            a learning rate that is not positive.
        TypeError: embeddings that are no float32 or float64.

    Notes:
        Departures from the released trainer, which runs 25 epochs of 2,000 steps on
        eight GPUs: learning rates fall by a cosine from the first step; by default W
        starts at the identity and each centre at its origin, centres have a rate of
        their own, and the softmax runs over a sample of the classes.
    """
    config = config or CosFaceConfig()
    if config.num_steps < 1 or not min(config.lr, config.centre_lr) > 0:
        raise ValueError(
            f"num_steps={config.num_steps}, lr={config.lr}, centre_lr="
            f"{config.centre_lr}: give at least one step and positive rates"
        )
    num_classes, dim = z_origin.shape[0], z_origin.shape[-1]
    is_whole = origin_of.dtype == torch.int64 and origin_of.shape == (len(z_gen),)
    if not (z_gen.dim() == z_origin.dim() == 2 and z_gen.shape[1] == dim and is_whole):
        raise ValueError(
            f"z_origin={tuple(z_origin.shape)}, z_gen={tuple(z_gen.shape)}, "
            f"origin_of={tuple(origin_of.shape)} {origin_of.dtype}: give (C, d), "
            "(n, d) and (n,) int64"
        )
    if z_gen.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"z_gen is {z_gen.dtype}: give float32 or float64")
    if len(z_gen) == 0 or origin_of.min() < 0 or origin_of.max() >= num_classes:
        raise ValueError(f"origin_of must hold origins in 0..{num_classes - 1}")
    if not (torch.isfinite(z_origin).all() and torch.isfinite(z_gen).all()):
        raise ValueError("z_origin or z_gen hold NaN or infinite numbers")
    if network is None:
        network = make_network(dim, config, generator=generator).to(z_gen)
    head = CosFaceHead(config.width or dim, num_classes, generator=generator).to(z_gen)
    with torch.no_grad():  # a centre starts at its origin's own descriptor
        if config.init == "identity":
            head.centres.copy_(unit(network(z_origin)))
    images = torch.cat([z_origin, z_gen])
    members = _Members(torch.cat([torch.arange(num_classes), origin_of.cpu()]))
    optimizer = torch.optim.Adam(
        [
            {"params": network.parameters(), "peak": config.lr},
            {"params": head.parameters(), "peak": config.centre_lr},
        ]
    )
    averaged = [p.detach().clone() for p in network.parameters()]
    curve = []
    for step in progress(range(config.num_steps), desc):
        for group in optimizer.param_groups:
            share = 0.5 * (1 + math.cos(math.pi * step / config.num_steps))
            group["lr"] = group["peak"] * max(0.01, share)
        picked = torch.randperm(num_classes, generator=generator)[: config.num_origins]
        draw = torch.rand(len(picked), config.num_images - 1, generator=generator)
        rows = members.draw(picked, draw)  # (P, K - 1)
        rows = torch.cat([picked[:, None], rows], 1).flatten()
        labels = picked.repeat_interleave(config.num_images)
        classes = _sample_classes(picked, num_classes, config.num_classes, generator)
        # Drawn on the CPU, moved without waiting for the step before.
        rows, labels = (t.to(z_gen.device, non_blocking=True) for t in (rows, labels))
        if classes is not None:
            classes = classes.to(z_gen.device, non_blocking=True)
        value = head.loss(network(images[rows]), labels, classes=classes)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        optimizer.step()
        weight = 1 - min(config.ema, (step + 1) / (step + 10))
        torch._foreach_lerp_(averaged, [p.data for p in network.parameters()], weight)
        curve.append(value.detach())
    with torch.no_grad():
        for p, mean in zip(network.parameters(), averaged, strict=True):
            p.copy_(mean)
    return network.requires_grad_(False), torch.stack(curve).tolist()


class _Members:
    """Which images belong to an origin, as a sorted list with starts."""

    def __init__(self, owner: Tensor) -> None:
        self.order = owner.argsort(stable=True)
        self.size = owner.bincount()
        self.start = self.size.cumsum(0) - self.size

    def draw(self, origins: Tensor, uniform: Tensor) -> Tensor:
        """One image for each number in [0, 1): (P, K), the origin itself left out.

        An origin without translations stands in for them.
        """
        rest = (self.size[origins] - 1)[:, None]
        # The origin is the first of its group, since the sort is stable.
        step = torch.where(rest > 0, 1 + (uniform * rest).long(), 0)
        return self.order[self.start[origins][:, None] + step]


def _sample_classes(
    picked: Tensor, num_classes: int, count: int, generator: torch.Generator | None
) -> Tensor | None:
    if count == 0 or count >= num_classes:
        return None
    others = torch.randperm(num_classes, generator=generator)[:count]
    return torch.cat([picked, others]).unique()
