"""The graph over patches: regions, the router that picks them, and the filter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from numbers import Integral
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from icml25.timefilter import fused

#: Same patch of other channels; other patches of the same channel; all the rest.
REGIONS = ("S", "T", "ST")


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # the cache outlives the caller's mode
def region_map(channels: int, patches: int) -> Tensor:
    r"""Which kind of neighbour every token is to every other.

    Tokens stand channel after channel: token :math:`i` is patch ``i % patches`` of
    channel ``i // patches``. A row holds :math:`C-1` spatial (0), :math:`N-1` temporal
    (1), :math:`(C-1)(N-1)` spatial-temporal (2) entries and itself (3); see
    ``eq-regions``.

    Args:
        channels: number of channels, :math:`C \ge 1`.
        patches: patches of a channel, :math:`N \ge 1`.

    Returns:
        int64 ``(C N, C N)``, symmetric. It is cached: do not write to it.

    Raises:
        ValueError: a count below one.

    Example:
        >>> region_map(2, 2)[0].tolist()
        [3, 1, 0, 2]
    """
    check_counts(channels=channels, patches=patches)
    # On the CPU whatever the caller's default: the cache outlives its context.
    token = torch.arange(channels * patches, device="cpu")
    same_channel = (token // patches)[:, None] == token // patches
    same_patch = (token % patches)[:, None] == token % patches
    both = same_channel & same_patch
    return 2 - 2 * same_patch.long() - same_channel.long() + 4 * both


class Routing(NamedTuple):
    """What a router decided.

    Attributes:
        gates: ``(B, H, L, 3)``, 0 or 1 for S, T, ST.
        probs: ``(B, H, L, 3)``, the probabilities behind them.
        loss: scalar, the router's own training loss.
    """

    gates: Tensor
    probs: Tensor
    loss: Tensor


class RegionRouter(nn.Module):
    r"""Chooses, for each token and head, the regions it listens to (``eq-router``).

    A token's row of scores gives three logits; regions are taken in descending
    probability until their sum first exceeds ``top_p``, that one included.

    Args:
        tokens: length :math:`L` of a row. The weights are tied to it, and to the order
            of channels and patches.
        top_p: threshold in [0, 1]; 1 keeps all three regions.
        kind: ``"released"``: the gates are hard and only the released routing loss
            trains them. ``"repaired"`` (ours): rows are scaled to unit size, the
            gates pass the forecast's gradient straight through, and the loss balances
            *mean probabilities of the three regions*.

    Raises:
        ValueError: no token, ``top_p`` outside [0, 1], or an unknown ``kind``.

    Source:
        The authors' code; the paper's overview figure names the two losses.
    """

    def __init__(
        self, tokens: int, *, top_p: float = 0.5, kind: str = "released"
    ) -> None:
        super().__init__()
        check_counts(tokens=tokens)
        _check_choice("router", kind, ("released", "repaired"))
        _check_range("top_p", top_p, 0 <= top_p <= 1, "from 0 to 1")
        self.top_p = top_p
        self.kind = kind
        self.gate = nn.Linear(tokens, 3, bias=False)
        self.noise = nn.Linear(tokens, 3, bias=False)

    def forward(self, rows: Tensor, noise: Tensor | None = None) -> Routing:
        """Route rows of scores.

        Args:
            rows: ``(B, H, L, L)`` scores after the k-nearest step.
            noise: ``(B, H, L, 3)`` standard normal draws; drawn here if ``None``; used
                in training mode only.
        """
        if rows.shape[-1] != self.gate.in_features:
            raise ValueError(
                f"rows has shape {tuple(rows.shape)}; rows of "
                f"tokens={self.gate.in_features} scores are needed"
            )
        logits = F.linear(rows, self.weight())
        if self.kind == "repaired":
            logits = logits * fused.row_scale(rows)
        return self.choose(logits, noise)

    def weight(self) -> Tensor:
        """The rows of all logits together: ``(6, L)``, in evaluation ``(3, L)``."""
        if self.training:
            return torch.cat((self.gate.weight, self.noise.weight))
        return self.gate.weight

    def choose(self, logits: Tensor, noise: Tensor | None = None) -> Routing:
        """Turn logits ``(B, H, L, 3 or 6)`` into gates, and price them."""
        gates, probs, ranked = self._decide(logits, noise)
        repaired = self.kind == "repaired"
        loss = _load_loss(probs) if repaired else _released_loss(ranked, probs)
        return Routing(gates, probs, loss)

    def decide(self, logits: Tensor, noise: Tensor | None = None) -> Tensor:
        """Turn logits ``(..., 3 or 6)`` into gates."""
        return self._decide(logits, noise)[0]

    def _decide(self, logits, noise):
        # (..., k) -> (k, ...): operations over three neighbours in memory are slow.
        logits = logits.movedim(-1, 0).contiguous()
        if self.training:
            logits, spread = logits.chunk(2)
            noise = torch.randn_like(logits) if noise is None else noise.movedim(-1, 0)
            logits = logits + noise * (F.softplus(spread) + 0.01)
        probs = logits.softmax(0)
        ranked, order = probs.sort(0, descending=True)
        # A region is kept when the more likely ones have not yet exceeded top_p.
        before = ranked.detach().cumsum(0) - ranked.detach()
        kept = (before <= self.top_p).to(probs.dtype)
        if self.top_p == 1:
            kept = torch.ones_like(kept)
        gates = torch.zeros_like(probs).scatter(0, order, kept)
        if self.kind == "repaired":
            gates = gates + probs - probs.detach()
        return [x.movedim(0, -1) for x in (gates, probs, ranked * kept)]


def _released_loss(ranked: Tensor, probs: Tensor) -> Tensor:
    """Importance over (token, rank) plus a tenth of the entropy term, ``eq-loss``."""
    samples, tokens = ranked.shape[0] * ranked.shape[1], ranked.shape[2]
    loss = probs.new_zeros(())
    if tokens > 1:
        load = ranked.sum((0, 1))
        loss = loss + load.var() / (load.mean().square() + 1e-10)
    if samples > 1:
        entropy = -(probs * (probs + 1e-10).log()).sum(2).mean()
        loss = loss + 0.1 * entropy
    return loss


def _load_loss(probs: Tensor) -> Tensor:
    """Squared coefficient of variation of the three regions' mean probabilities."""
    share = probs.mean((0, 1, 2))
    return share.var() / share.mean().square()


class FilterWeights(NamedTuple):
    """Every stage of one filter: arrays ``(B, H, L, L)``, gates ``(B, H, L, 3)``."""

    scores: Tensor
    kept: Tensor
    gates: Tensor
    weights: Tensor
    loss: Tensor


class GraphFilter(nn.Module):
    r"""Each token averages the values of the neighbours its filter lets through.

    Scores :math:`A = \mathrm{GELU}(uk^\top)`, the ``alpha L`` smallest of a row
    removed, a region mask, a softmax and a mean (``eq-filter``).

    Args:
        channels: number of channels :math:`C`.
        patches: patches of a channel :math:`N`; :math:`L = CN` tokens.
        dim: model width :math:`d`, a multiple of ``num_heads``.
        num_heads: heads :math:`H`.
        alpha: share of each row that the k-nearest step removes, in [0, 1): the
            ``m = int(alpha L)`` smallest scores, and with them all that equal the
            largest of these. Ties are common in half precision and rare otherwise,
            except for tokens that are alike: flat channels without positions.
        top_p: the router's threshold; 0 switches routing off and closes every region,
            as in the release.
        filter: ``"routed"``, or the regions that stay open, any of S, T, ST:
            ``("T",)`` treats channels alone, ``("S", "T", "ST")`` mixes all of them,
            ``()`` leaves each token its own score.
        mask: ``"zero"`` multiplies removed scores by zero before the softmax, as
            released (a removed edge keeps weight :math:`e^0/Z`); ``"minus_inf"``
            removes it (the self edge always stays). With fixed regions the k-nearest
            step then ranks the open edges only and removes a share ``alpha`` of them,
            so that nothing depends on a closed edge. A router reads the whole row, so
            there the whole row is ranked.
        router: ``"released"`` or ``"repaired"``, see :class:`RegionRouter`.
        dropout: share of the weights dropped in training.

    Shapes:
        ``B`` batch, ``H`` heads, ``L`` tokens, ``d`` width.

    Notes:
        Time is :math:`O(BHL^2 d/H)`. Memory between the passes is :math:`O(BLd)`, plus
        one byte an edge under dropout. Where every region is closed by zeros the
        softmax falls away (``eq-identity``).

    Raises:
        ValueError: a size, share or name that is not allowed.
    """

    def __init__(
        self,
        channels: int,
        patches: int,
        dim: int,
        *,
        num_heads: int = 4,
        alpha: float = 0.1,
        top_p: float = 0.5,
        filter: str | Sequence[str] = "routed",
        mask: str = "zero",
        router: str = "released",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_counts(channels=channels, patches=patches, dim=dim, num_heads=num_heads)
        tokens = channels * patches
        if dim % num_heads:
            raise ValueError(f"dim={dim} is not a multiple of num_heads={num_heads}")
        _check_range("alpha", alpha, 0 <= alpha < 1, "at least 0 and below 1")
        _check_range("top_p", top_p, 0 <= top_p <= 1, "from 0 to 1")
        _check_range("dropout", dropout, 0 <= dropout < 1, "at least 0 and below 1")
        _check_choice("mask", mask, ("zero", "minus_inf"))
        self.channels, self.patches, self.num_heads = channels, patches, num_heads
        self.mask = mask
        self.dropout = dropout
        self.left = nn.Linear(dim // num_heads, dim // num_heads)
        self.right = nn.Linear(dim // num_heads, dim // num_heads)
        self.value = nn.Linear(dim, dim)
        self.router: RegionRouter | None = None
        if filter == "routed" and top_p > 0:
            self.router = RegionRouter(tokens, top_p=top_p, kind=router)
        regions = () if filter == "routed" else _regions(filter)
        self.fixed = tuple(name in regions for name in REGIONS)
        ranked, unranked = tokens, None
        if mask == "minus_inf":
            kinds = region_map(channels, patches)
            closed = [k for k in range(3) if not (self.router or self.fixed[k])]
            out_of_rank = torch.isin(kinds, torch.tensor([*closed, 3], device="cpu"))
            ranked = tokens - int(torch.isin(kinds[0], kinds.new_tensor(closed)).sum())
            unranked = torch.where(out_of_rank, math.inf, 0.0).to(self.value.weight)
        self.num_removed = int(alpha * ranked)
        # Added before ranking; not persistent: it follows from the options.
        self.register_buffer("unranked", unranked, persistent=False)

    def forward(
        self, h: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Routing | None]:
        """Filter tokens ``(B, L, d)``; returns the same shape and the routing.

        Raises:
            ValueError: a shape that does not fit; ``noise`` is ``(B, H, L, 3)``.
        """
        tokens, dim = self.channels * self.patches, self.value.in_features
        if h.ndim != 3 or h.shape[1:] != (tokens, dim):
            raise ValueError(
                f"h has shape {tuple(h.shape)}; (batch, tokens={tokens}, dim={dim}) is "
                "needed"
            )
        wanted = (len(h), self.num_heads, tokens, 3)
        if noise is not None and noise.shape != wanted:
            raise ValueError(
                f"noise has shape {tuple(noise.shape)}; {wanted} is needed"
            )
        left, right = self._pairs(h)
        values = self.value(h).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        batch, heads = left.shape[:2]
        left, right, values = (x.flatten(0, 1) for x in (left, right, values))
        dropout = self.dropout if self.training else 0.0
        routing = None
        if self.router is None and self.mask == "zero" and not any(self.fixed):
            out = fused.self_gated_mean(
                left, right, values, removed=self.num_removed, dropout=dropout
            )
        else:
            edges = fused.Edges(self.channels, self.num_removed, self.unranked)
            if self.router is None:
                steering, router = self._fixed_gates(left), None
            else:
                # Under autocast the scores are of half precision, the weight is not.
                steering = self.router.weight().to(left.dtype)
                router = self._router(left, noise)
            out, logits = fused.FilteredMean.apply(
                left, right, values, steering, router, edges, dropout
            )
            if router is not None:
                noise = router.noise
                routing = self.router.choose(
                    logits.unflatten(0, (batch, heads)),
                    None if noise is None else noise.unflatten(0, (batch, heads)),
                )
        # (B H, L, d/H) -> (B, L, d)
        return out.unflatten(0, (batch, heads)).transpose(1, 2).flatten(2), routing

    def weights(self, h: Tensor, noise: Tensor | None = None) -> FilterWeights:
        """The readable form of :meth:`forward` without dropout, stage by stage.

        ``weights @ values`` is what :meth:`forward` returns. Its gradient is
        :meth:`forward`'s too, except for ``router="repaired"`` with
        ``mask="minus_inf"``, where the logarithm of a closed gate makes it NaN.
        """
        left, right = self._pairs(h)
        scores = F.gelu(left @ right.mT)
        kept = self._nearest(scores)
        rows = scores * kept
        gates, loss = self._fixed_gates(scores), scores.new_zeros(())
        if self.router is not None:
            gates, _, loss = self.router(rows, noise)
        regions = region_map(self.channels, self.patches).to(h.device)
        open_to = torch.cat((gates, torch.ones_like(gates[..., :1])), -1)
        mask = open_to.gather(-1, regions.expand_as(scores))
        if self.mask == "zero":
            weights = (rows * mask).softmax(-1)
        else:
            weights = (scores + mask.log()).masked_fill(~kept, -math.inf).softmax(-1)
        return FilterWeights(scores, kept, gates, weights, loss)

    def _nearest(self, scores: Tensor) -> Tensor:
        if not self.num_removed:
            return torch.ones_like(scores, dtype=torch.bool)
        ranked = scores.detach()
        if self.unranked is not None:
            ranked = ranked + self.unranked
        return ranked > fused.smallest(ranked, self.num_removed)

    def _pairs(self, h: Tensor) -> tuple[Tensor, Tensor]:
        # (B, L, d) -> (B, H, L, d/H)
        split = h.unflatten(-1, (self.num_heads, -1)).transpose(1, 2).contiguous()
        return self.left(split), self.right(split)

    def _router(self, left: Tensor, noise: Tensor | None) -> fused.Router:
        if not self.training:
            noise = None
        elif noise is None:
            noise = torch.randn(
                *left.shape[:2], 3, device=left.device, dtype=left.dtype
            )
        else:
            noise = noise.flatten(0, 1)
        repaired = self.router.kind == "repaired"
        return fused.Router(noise, self.router.decide, repaired, repaired)

    def _fixed_gates(self, rows: Tensor) -> Tensor:
        gates = rows.new_tensor(self.fixed, dtype=rows.dtype)
        return gates.expand(*rows.shape[:-1], 3)


def _regions(filter: str | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(filter, str | Sequence):
        raise TypeError(f"filter={filter!r}: give 'routed' or a sequence of regions")
    names = (filter,) if isinstance(filter, str) else tuple(filter)
    if unknown := [name for name in names if name not in REGIONS]:
        raise ValueError(
            f"filter={filter!r}: {unknown[0]!r} is no region; give 'routed' or any of "
            f"{', '.join(REGIONS)}"
        )
    return names


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(choices)}")


def check_counts(**counts: int) -> None:
    """Raise a ValueError that names the first count that is no whole number from 1."""
    for name, value in counts.items():
        fits = isinstance(value, Integral) and value >= 1
        _check_range(name, value, fits, "a whole number from 1")


def _check_range(name: str, value: float, fits: bool, allowed: str) -> None:
    if not fits:
        raise ValueError(f"{name}={value}: allowed is {allowed}")
