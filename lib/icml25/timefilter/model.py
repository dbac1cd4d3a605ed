"""TimeFilter: patches of all channels as one graph, and the forecast from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from icml25.timefilter.fused import Dropout
from icml25.timefilter.graph import GraphFilter, Routing, check_counts


class Forecast(NamedTuple):
    """A forecast.

    Attributes:
        y: ``(B, S, C)``, in the input's units.
        routing_loss: scalar, the mean of the layers' routing losses (0 unless routed).
        gates: per layer ``(B, H, L, 3)``, or ``None`` where nothing is routed.
    """

    y: Tensor
    routing_loss: Tensor
    gates: tuple[Tensor | None, ...] = ()


class TimeFilterBlock(nn.Module):
    """Pre-norm residual block: the graph filter, then a feed-forward network.

    Args:
        channels, patches, dim: as in :class:`GraphFilter`.
        dim_ff: width of the hidden layer.
        dropout: in the filter's weights and in the hidden layer.
        options: further options of :class:`GraphFilter`.
    """

    def __init__(
        self,
        channels: int,
        patches: int,
        dim: int,
        dim_ff: int,
        *,
        dropout: float,
        options: Mapping[str, object],
    ) -> None:
        super().__init__()
        self.norm_graph = nn.LayerNorm(dim)
        self.graph = GraphFilter(channels, patches, dim, dropout=dropout, **options)
        self.norm_ffn = nn.LayerNorm(dim)
        self.ffn = nn.Sequential(
            nn.Linear(dim, dim_ff), nn.GELU(), Dropout(dropout), nn.Linear(dim_ff, dim)
        )

    def forward(
        self, h: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Routing | None]:
        """Tokens ``(B, L, d)`` to tokens, and the routing."""
        mixed, routing = self.graph(self.norm_graph(h), noise)
        h = h + mixed
        return h + self.ffn(self.norm_ffn(h)), routing


class TimeFilter(nn.Module):
    r"""Forecasts all channels from a graph over all their patches.

    Normalise each window, cut it into patches, embed them, let each token listen to the
    neighbours its filter keeps, and read the forecast off a channel's tokens
    (``eq-model``). Ablations are arguments: ``filter=("T",)`` treats channels alone,
    ``filter=("S", "T", "ST")`` mixes all of them.

    Args:
        channels: number of channels :math:`C`.
        lookback: window length :math:`T`, a multiple of ``patch_len``.
        horizon: steps to forecast :math:`S`.
        patch_len: patch length :math:`P`.
        dim: model width :math:`d`.
        dim_ff: width of the feed-forward layer.
        num_heads: heads :math:`H`.
        num_layers: blocks.
        alpha: share of each row removed by the k-nearest step, in [0, 1).
        top_p: the router's threshold, in [0, 1]; 0 switches routing off.
        positional: add sinusoids over the token index (needs an even ``dim``).
        dropout: in [0, 1).
        filter, mask, router: see :class:`GraphFilter`. The defaults are the release.

    Shapes:
        ``B`` windows, ``T`` steps, ``C`` channels, ``N = T / P`` patches,
        ``L = C N`` tokens, ``S`` steps ahead.

    Notes:
        The forecast follows an affine change of a channel, up to the :math:`10^{-5}`
        added to its variance; a constant channel is forecast as about that constant.

    Raises:
        ValueError: sizes that do not fit, or shares and names that are not allowed.

    Example:
        >>> model = TimeFilter(channels=7, lookback=96, horizon=24, patch_len=24)
        >>> model(torch.randn(2, 96, 7)).y.shape
        torch.Size([2, 24, 7])
    """

    def __init__(
        self,
        channels: int,
        lookback: int,
        horizon: int,
        *,
        patch_len: int,
        dim: int = 128,
        dim_ff: int = 256,
        num_heads: int = 4,
        num_layers: int = 2,
        alpha: float = 0.1,
        top_p: float = 0.5,
        positional: bool = True,
        dropout: float = 0.0,
        filter: str | Sequence[str] = "routed",
        mask: str = "zero",
        router: str = "released",
    ) -> None:
        super().__init__()
        check_counts(
            channels=channels,
            lookback=lookback,
            horizon=horizon,
            patch_len=patch_len,
            dim=dim,
            dim_ff=dim_ff,
            num_heads=num_heads,
            num_layers=num_layers,
        )
        if lookback % patch_len:
            raise ValueError(
                f"lookback={lookback} is not a multiple of patch_len={patch_len}: "
                "patches would straddle channels"
            )
        if positional and dim % 2:
            raise ValueError(f"dim={dim}: sinusoidal positions need an even width")
        self.channels, self.lookback, self.patch_len = channels, lookback, patch_len
        self.patches = lookback // patch_len
        self.embed = nn.Linear(patch_len, dim)
        position = _sinusoids(channels * self.patches, dim) if positional else None
        # Not persistent: it follows from the sizes.
        self.register_buffer("position", position, persistent=False)
        options = {
            "num_heads": num_heads,
            "alpha": alpha,
            "top_p": top_p,
            "filter": filter,
            "mask": mask,
            "router": router,
        }
        self.blocks = nn.ModuleList(
            TimeFilterBlock(
                channels, self.patches, dim, dim_ff, dropout=dropout, options=options
            )
            for _ in range(num_layers)
        )
        self.head = nn.Linear(self.patches * dim, horizon)

    def tokens(self, x: Tensor) -> Tensor:
        """Normalised windows ``(B, T, C)`` to embedded patches ``(B, L, d)``."""
        # (B, T, C) -> (B, C, T) -> (B, C N, P)
        patches = x.mT.reshape(len(x), -1, self.patch_len)
        h = self.embed(patches)
        return h if self.position is None else h + self.position

    def forward(self, x: Tensor, noise: Sequence[Tensor] | None = None) -> Forecast:
        """Forecast windows.

        Args:
            x: ``(B, T, C)``.
            noise: per layer ``(B, H, L, 3)`` draws for the routers (training only).

        Raises:
            TypeError: ``x`` is no tensor.
            ValueError: no window, a wrong shape or type, or a value that is not finite.
                On a GPU finiteness is checked in evaluation only: in training it would
                stall every step.
        """
        self._check(x)
        if noise is not None and len(noise) != len(self.blocks):
            raise ValueError(
                f"noise holds {len(noise)} draws; one for each of the "
                f"{len(self.blocks)} layers is needed"
            )
        mean = x.mean(1, keepdim=True).detach()
        spread = (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt().detach()
        h = self.tokens((x - mean) / spread)
        routings = []
        for depth, block in enumerate(self.blocks):
            h, routing = block(h, None if noise is None else noise[depth])
            routings.append(routing)
        # (B, C N, d) -> (B, C, N d) -> (B, C, S) -> (B, S, C)
        y = self.head(h.reshape(len(x), self.channels, -1)).mT
        losses = [routing.loss for routing in routings if routing is not None]
        loss = torch.stack(losses).mean() if losses else y.new_zeros(())
        gates = tuple(None if r is None else r.gates.detach() for r in routings)
        return Forecast(y * spread + mean, loss, gates)

    def _check(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"x is a {type(x).__name__}; a tensor is needed")
        if x.ndim != 3 or x.shape[1:] != (self.lookback, self.channels):
            raise ValueError(
                f"x has shape {tuple(x.shape)}; (batch, lookback={self.lookback}, "
                f"channels={self.channels}) is needed"
            )
        if not x.is_floating_point():
            raise ValueError(f"x holds {x.dtype}; a floating-point type is needed")
        if x.dtype != self.head.weight.dtype:
            raise ValueError(
                f"x holds {x.dtype} and the model {self.head.weight.dtype}: convert one"
            )
        if not len(x):
            raise ValueError(f"x has shape {tuple(x.shape)}: it holds no window")
        if not self.training or x.device.type == "cpu":
            check_finite(x)


def check_finite(x: Tensor) -> None:
    """Raise a ValueError that names the channels with NaN or infinity."""
    bad = ~torch.isfinite(x).flatten(0, -2).all(0)
    if bad.any():
        raise ValueError(
            f"channel {bad.nonzero().flatten().tolist()} holds NaN or infinity: "
            "fill or drop those values first"
        )


def _sinusoids(count: int, dim: int) -> Tensor:
    """Sine on even, cosine on odd columns: ``(count, dim)``."""
    rate = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    angle = torch.arange(count)[:, None] * rate
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)


_RELEASED_NAMES = (
    ("patch_embed.patch_proj.", "embed."),
    ("backbone.blocks.", "blocks."),
    (".norm1.", ".norm_graph."),
    (".norm2.", ".norm_ffn."),
    (".gnn.graph_learner.proj_1.", ".graph.left."),
    (".gnn.graph_learner.proj_2.", ".graph.right."),
    (".gnn.graph_learner.mask_moe.", ".graph.router."),
    (".gnn.graph_conv.proj.", ".graph.value."),
)


def released_state(state: Mapping[str, Tensor], model: TimeFilter) -> dict[str, Tensor]:
    """Rename the authors' parameters to ours, for ``model.load_state_dict``.

    ========================================  =======================
    release                                   here
    ========================================  =======================
    ``patch_embed.patch_proj``                ``embed``
    ``backbone.blocks.<b>.norm1, norm2``      ``blocks.<b>.norm_graph, norm_ffn``
    ``...gnn.graph_learner.proj_1, proj_2``   ``...graph.left, right``
    ``...gnn.graph_learner.mask_moe``         ``...graph.router``
    ``...gnn.graph_conv.proj``                ``...graph.value``
    ``...ffn.0, ffn.3``; ``head``             the same
    ========================================  =======================

    The sinusoid table is left out (it is computed), and so is a router that ``model``
    does not have (the release keeps one it does not use when ``top_p`` is 0).
    """
    wanted = model.state_dict()
    renamed = {}
    for name, value in state.items():
        for old, new in _RELEASED_NAMES:
            name = name.replace(old, new)
        unused = ".router." in name and name not in wanted
        if not unused and not name.startswith("patch_embed.pe"):
            renamed[name] = value
    return renamed
