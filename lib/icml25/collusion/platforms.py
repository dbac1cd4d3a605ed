"""Platforms that learn: a linear softmax and a small network over one-hot columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Platform", "train_platform"]


class Platform(nn.Module):
    """Logits from integer-coded columns.

    The first layer is linear in the one-hot columns, which are made batch by batch.

    Args:
        sizes: number of values of each column.
        num_labels: Y.
        hidden: widths of hidden layers; none is multinomial logistic regression.
        generator: draws the first weights.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        num_labels: int,
        *,
        hidden: Sequence[int] = (),
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        widths = [*hidden, num_labels]
        self.first = nn.Parameter(torch.empty(sum(sizes), widths[0]))
        self.layers = nn.ModuleList(
            nn.Linear(a, b) for a, b in zip(widths[:-1], widths[1:], strict=True)
        )
        offsets = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        self.register_buffer("offsets", offsets)
        nn.init.normal_(self.first, std=1 / math.sqrt(len(sizes)), generator=generator)
        for layer in self.layers:
            std = math.sqrt(2 / layer.in_features)
            nn.init.normal_(layer.weight, std=std, generator=generator)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) codes, each within its column's size (unchecked) -> (B, Y) logits."""
        places = (x + self.offsets).long()
        one_hot = self.first.new_zeros(len(x), len(self.first)).scatter_(1, places, 1.0)
        out = one_hot @ self.first  # (B, sum of sizes) -> (B, width)
        for layer in self.layers:
            out = layer(out.relu())
        return out

    @torch.no_grad()
    def labels(self, x: Tensor) -> Tensor:
        """(B, C) codes -> (B,) predicted labels."""
        return self(x).argmax(-1)


def train_platform(
    x: Tensor,
    y: Tensor,
    *,
    sizes: Sequence[int],
    num_labels: int,
    kind: str = "linear",
    epochs: int = 2,
    batch_size: int = 500,
    lr: float = 0.01,
    generator: torch.Generator,
) -> Platform:
    """Train a platform on the rows it was given, honest and coordinated alike.

    Args:
        x: (n, C) codes.
        y: (n,) labels.
        sizes: number of values of each column.
        num_labels: Y.
        kind: ``"linear"`` or ``"mlp"`` (two hidden layers of 64).
        epochs: passes over the rows.
        batch_size: rows a step.
        lr: of Adam, falling to zero along a cosine.
        generator: first weights and the order of rows; on the device of ``x``.

    Returns:
        The trained platform.

    Raises:
        ValueError: another kind, no rows, a size that is not positive, or a code or
            label outside its alphabet.
    """
    if kind not in ("linear", "mlp"):
        raise ValueError(f"kind={kind!r}: allowed are 'linear' and 'mlp'")
    if x.ndim != 2 or not len(x) or y.shape != x.shape[:1] or len(sizes) != x.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)}, y {tuple(y.shape)}, {len(sizes)} sizes: need rows, "
            "one label a row and one size a column"
        )
    if epochs < 1 or batch_size < 1:
        raise ValueError(f"epochs={epochs}, batch_size={batch_size} must be positive")
    if min(sizes, default=0) < 1 or num_labels < 1:
        raise ValueError(
            f"sizes={list(sizes)}, num_labels={num_labels}: every column and the label "
            "need at least one value"
        )
    # A code beyond its column would light the next column's.
    for name, codes, size in [
        *((f"x[:, {place}]", x[:, place], size) for place, size in enumerate(sizes)),
        ("y", y, num_labels),
    ]:
        least, largest = (end.item() for end in codes.aminmax())
        if least < 0 or largest >= size:
            wrong = least if least < 0 else largest
            raise ValueError(f"{name} holds {wrong}; allowed are 0..{size - 1}")
    hidden = () if kind == "linear" else (64, 64)
    with torch.device(x.device):
        model = Platform(sizes, num_labels, hidden=hidden, generator=generator)
    x, y = x.int(), y.long()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
    steps = epochs * math.ceil(len(x) / batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=generator, device=x.device)
        for batch in order.split(batch_size):
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model
