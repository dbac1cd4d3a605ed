"""The chapter's pictures of models over time, and its audio players."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from icml25.core import COLORS

from .griffin import GriffinConfig
from .theory import griffin_bytes, half_life, transformer_bytes
from .transformer import TransformerConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "draw_coherence",
    "draw_memory",
    "draw_nll",
    "gate_figure",
    "length_frame",
    "mp3_uri",
    "players",
    "swap_frame",
]

LABELS = {
    "hybrid": "hybrid (Griffin)",
    "full": "Transformer, full attention",
    "window": "Transformer, windowed",
}
MODEL_COLORS = {
    "hybrid": COLORS["method"],
    "full": COLORS["baseline"],
    "window": COLORS["orange"],
}
TOKENS_PER_S = 25
TRAINED_S = 5.1


def draw_coherence(
    ax: Axes, curves: Mapping[str, Sequence[Sequence[float]]], *, bin_s: float = 10.0
) -> None:
    """Share of digits that count on, against time; one thin line a seed."""
    for name, seeds in curves.items():
        longest = max(map(len, seeds))
        for row in seeds:
            time = [(at + 0.5) * bin_s for at in range(len(row))]
            ax.plot(time, row, color=MODEL_COLORS[name], lw=0.8, alpha=0.5)
        mean = [
            _mean([row[at] for row in seeds if at < len(row)]) for at in range(longest)
        ]
        time = [(at + 0.5) * bin_s for at in range(longest)]
        ax.plot(time, mean, color=MODEL_COLORS[name], lw=2, label=LABELS[name])
    ax.axhline(0.1, color=COLORS["ink"], lw=0.8, ls=":")
    ax.annotate("chance", (1, 0.01), xycoords=("axes fraction", "data"), ha="right")
    ax.axvspan(0, TRAINED_S, color=COLORS["sky"], alpha=0.35, lw=0)
    ax.set(xlabel="seconds of speech after the prompt", ylabel="coherence")
    ax.set_ylim(0, 1.04)
    ax.set_xlim(0)


def draw_nll(
    ax: Axes, edges: Sequence[int], curves: Mapping[str, Sequence[Sequence[float]]]
) -> None:
    """Nats a token in each range of positions; one thin line a seed."""
    middle = [math.sqrt(max(a, 16) * b) for a, b in zip(edges, edges[1:], strict=False)]
    for name, seeds in curves.items():
        for row in seeds:
            ax.plot(middle, row, color=MODEL_COLORS[name], lw=0.8, alpha=0.5)
        mean = [_mean(values) for values in zip(*seeds, strict=True)]
        ax.plot(middle, mean, "o-", color=MODEL_COLORS[name], ms=4, label=LABELS[name])
    ax.axvspan(10, 128, color=COLORS["sky"], alpha=0.35, lw=0)
    ax.set_xscale("log", base=2)
    ax.set_xticks(middle, [f"{a}–{b}" for a, b in zip(edges, edges[1:], strict=False)])
    ax.minorticks_off()
    ax.set(xlabel="token of the recording", ylabel="nats a token", xlim=(20, 2048))
    ax.set_ylim(0)


def draw_memory(axes: Sequence[Axes], found: Mapping, *, batch: str) -> None:
    """Bytes of state, and tokens a second, against the length."""
    from matplotlib.ticker import LogLocator

    lengths = found["lengths"]
    for name in ("hybrid", "full"):
        row = found[name][batch]
        style = {
            "color": MODEL_COLORS[name],
            "marker": "o",
            "ms": 4,
            "label": LABELS[name],
        }
        axes[0].plot(lengths, [b / 1e6 for b in row["state_bytes"]], **style)
        axes[1].plot(lengths, row["tokens_per_s"], **style)
    for ax, label in zip(axes, ("MB of state", "tokens a second"), strict=True):
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
        ax.minorticks_off()
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        ax.yaxis.set_major_formatter("{x:,g}")
        ax.set(xlabel="tokens read so far", ylabel=label)


def gate_figure(a: float, r: float) -> Figure:
    """Decay, input scale and impulse response of one unit, on a clock."""
    from matplotlib.figure import Figure

    decay = a ** (8 * r)
    life = float(half_life(a, r)) / TOKENS_PER_S
    seconds = torch.linspace(0, 20, 81)
    figure = Figure(figsize=(6.4, 2.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 2.4))
    left.bar(
        ["decay", "input scale"],
        [decay, math.sqrt(1 - decay**2)],
        color=[COLORS["method"], COLORS["orange"]],
    )
    left.set_ylim(0, 1.05)
    kept = decay ** (TOKENS_PER_S * seconds)
    right.plot(seconds, kept, color=COLORS["method"])
    right.axhline(0.5, color=COLORS["baseline"], lw=0.8, ls=":")
    if life < 20:
        right.plot([life], [0.5], "o", color=COLORS["orange"])
    unit = f"{1000 * life:.0f} ms" if life < 1 else f"{life:.1f} s"
    right.set_title(f"half is left after {unit}")
    right.set(xlabel="seconds after the input", ylabel="share left", ylim=(0, 1.05))
    return figure


def length_frame(
    seconds: int,
    curves: Mapping[str, Sequence[float]],
    hybrid: GriffinConfig,
    full: TransformerConfig,
    *,
    bin_s: float = 10.0,
    sounds: Mapping[str, str] | None = None,
) -> str:
    """One frame of the length machine: quality, memory and sound at a length.

    Args:
        seconds: how much has been spoken.
        curves: coherence of each window of ``bin_s`` seconds, by model.
        hybrid: size, for its bytes.
        full: size, for its bytes.
        bin_s: length of a window.
        sounds: model -> data URI of its last seconds.

    Returns:
        HTML.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2.2, 1))
    for name, row in curves.items():
        shown = row[: max(1, round(seconds / bin_s))]
        time = [(at + 0.5) * bin_s for at in range(len(shown))]
        left.plot(time, shown, "o-", ms=3, color=MODEL_COLORS[name], label=LABELS[name])
    left.axhline(0.1, color=COLORS["ink"], lw=0.8, ls=":")
    longest = bin_s * max(map(len, curves.values()))
    left.set(xlim=(0, longest), ylim=(0, 1.05), xlabel="seconds", ylabel="coherence")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    tokens = seconds * TOKENS_PER_S
    sizes = [griffin_bytes(hybrid) / 1e3, transformer_bytes(full, tokens) / 1e3]
    top = transformer_bytes(full, round(longest * TOKENS_PER_S)) / 1e3
    right.bar(
        ["hybrid", "full"], sizes, color=[MODEL_COLORS["hybrid"], MODEL_COLORS["full"]]
    )
    for at, size in enumerate(sizes):
        right.annotate(f"{size:,.0f} kB", (at, size), ha="center", va="bottom")
    right.set(ylim=(0, 1.15 * top), ylabel="kB of state, one speaker")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    picture = base64.b64encode(buffer.getvalue()).decode()
    alt = f"Coherence up to {seconds} s and state of both models"
    text = (
        f'<img alt="{alt}" style="max-width:100%;width:640px;height:auto" '
        f'src="data:image/png;base64,{picture}">'
    )
    for name, uri in (sounds or {}).items():
        text += _player(f"{LABELS[name]}, the seconds before {seconds} s", uri)
    return text


def mp3_uri(audio: Tensor, sample_rate: int) -> str:
    """A mono sound as a data URI that every browser plays.

    Args:
        audio: ``(samples,)``; scaled so that the loudest sample is 0.9.
        sample_rate: in Hz.

    Raises:
        ValueError: an empty or silent sound, or one that is not finite.
    """
    import soundfile

    audio = audio.detach().cpu().flatten().float()
    if not len(audio) or not audio.isfinite().all() or audio.abs().max() == 0:
        raise ValueError("audio must be finite, and neither empty nor silent")
    buffer = io.BytesIO()
    soundfile.write(
        buffer,
        (0.9 * audio / audio.abs().max()).numpy(),
        sample_rate,
        format="MP3",
        bitrate_mode="CONSTANT",
        compression_level=0.9,
    )
    return "data:audio/mpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


class _Players:
    def __init__(self, sounds: Mapping[str, str]) -> None:
        self.sounds = sounds

    def __repr__(self) -> str:
        return "sounds: " + "; ".join(self.sounds)

    def _repr_html_(self) -> str:
        return "".join(_player(label, uri) for label, uri in self.sounds.items())


def players(sounds: Mapping[str, Tensor], sample_rate: int) -> _Players:
    """One labelled audio player a sound; works offline.

    Args:
        sounds: label -> ``(samples,)``.
        sample_rate: in Hz.
    """
    return _Players({k: mp3_uri(v, sample_rate) for k, v in sounds.items()})


def swap_frame(prompt: str, cosines: Mapping[str, float], uri: str) -> str:
    """One frame of the voice swap: a sound, and whose voice it is like.

    Args:
        prompt: name of the voice that gave the prompt.
        cosines: similarity to each real voice, by name.
        uri: the sound.

    Returns:
        HTML.
    """
    near = ", ".join(
        f"<b>{html.escape(name)}</b> {value:.1f}"
        if name == prompt
        else f"{html.escape(name)} {value:.1f}"
        for name, value in cosines.items()
    )
    return _player(f"the same tokens, prompt of {prompt}", uri) + (
        f"<p>cosine to the real voices: {near}</p>"
    )


def _player(label: str, uri: str) -> str:
    label = html.escape(label)
    return (
        '<figure style="margin:.4em 0">'
        f'<figcaption style="font:inherit;text-align:left">{label}</figcaption>'
        f'<audio controls preload="none" aria-label="{label}" '
        f'style="width:100%;max-width:420px" src="{uri}"></audio></figure>'
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
