"""Speech in and out: log-mel frames from ``torch.stft`` and Griffin-Lim back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["MelConfig", "check_audio", "griffin_lim", "log_mel", "mel_filters"]


@dataclass(frozen=True)
class MelConfig:
    """A time-frequency grid; the defaults suit 16 kHz speech."""

    sample_rate: int = 16_000  # Hz
    n_fft: int = 512  # points of the transform
    win_length: int = 400  # samples, 25 ms
    hop_length: int = 160  # samples, 10 ms: 100 frames a second
    num_mels: int = 64  # bands
    f_min: float = 50.0  # Hz
    f_max: float = 7_600.0  # Hz
    floor: float = 1e-6  # smallest band power under the logarithm

    def __post_init__(self) -> None:
        if not 0 < self.hop_length <= self.win_length <= self.n_fft:
            raise ValueError(
                f"hop_length={self.hop_length}, win_length={self.win_length}, "
                f"n_fft={self.n_fft}: need 0 < hop_length <= win_length <= n_fft"
            )
        if not 0 <= self.f_min < self.f_max <= self.sample_rate / 2:
            raise ValueError(
                f"f_min={self.f_min}, f_max={self.f_max}: need 0 <= f_min < f_max <= "
                f"{self.sample_rate / 2} Hz, half the sample rate"
            )
        if self.num_mels < 1 or self.floor <= 0:
            raise ValueError(
                f"num_mels={self.num_mels}, floor={self.floor}: both must be positive"
            )

    @property
    def frame_rate(self) -> float:
        """Frames a second."""
        return self.sample_rate / self.hop_length


_LOUDEST = 30.0  # log power; a full-scale tone in a window of 4096 points has 15

TELEPHONE = MelConfig(
    sample_rate=8_000,
    n_fft=256,
    win_length=200,
    hop_length=80,
    num_mels=40,
    f_max=4_000.0,
)


def check_audio(
    audio: Tensor, sample_rate: int, *, expected_rate: int, min_samples: int = 1
) -> None:
    """Refuse audio that would travel on as nonsense.

    Args:
        audio: (..., N) floating-point samples.
        sample_rate: Hz, as the file states it.
        expected_rate: Hz, what the reader of the samples assumes.
        min_samples: the shortest recording allowed.

    Raises:
        TypeError: integer samples.
        ValueError: another sample rate, too few samples, NaN or infinity.
    """
    if not audio.is_floating_point():
        raise TypeError(
            f"audio has dtype {audio.dtype}: give floating-point samples in [-1, 1]"
        )
    if sample_rate != expected_rate:
        raise ValueError(
            f"sample_rate={sample_rate}: this needs {expected_rate} Hz; resample first"
        )
    if audio.ndim == 0 or audio.shape[-1] < min_samples:
        raise ValueError(
            f"audio of shape {tuple(audio.shape)} is too short: at least {min_samples} "
            f"samples ({1e3 * min_samples / expected_rate:.0f} ms) are needed"
        )
    if not torch.isfinite(audio).all():
        raise ValueError("audio holds NaN or infinite samples: clean it first")


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # the cache outlives the caller's mode and device
def _filters(config: MelConfig) -> Tensor:
    def mel(hz: float) -> float:
        return 2595 * math.log10(1 + hz / 700)

    make = {"dtype": torch.float64, "device": "cpu"}
    low, high = mel(config.f_min), mel(config.f_max)
    edges = torch.linspace(low, high, config.num_mels + 2, **make)
    edges = 700 * (10 ** (edges / 2595) - 1)  # Hz
    bins = torch.arange(config.n_fft // 2 + 1, **make)
    bins = bins * config.sample_rate / config.n_fft
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    weight = torch.minimum(rising, falling).clamp(min=0)
    if (empty := (weight.sum(1) == 0).sum().item()) > 0:
        raise ValueError(
            f"num_mels={config.num_mels}: {empty} bands hold no bin of a transform of "
            f"n_fft={config.n_fft} points; take fewer bands or a larger n_fft"
        )
    return weight


def mel_filters(config: MelConfig) -> Tensor:
    """Triangles that are equally wide on the mel scale 2595 log10(1 + f / 700).

    Returns:
        (num_mels, n_fft // 2 + 1) weights; neighbours sum to 1 between band centres.

    Raises:
        ValueError: a band too narrow to hold a single bin.
    """
    return _filters(config).clone()


def _stft(audio: Tensor, config: MelConfig) -> Tensor:
    window = torch.hann_window(
        config.win_length, device=audio.device, dtype=audio.dtype
    )
    return torch.stft(
        audio,
        config.n_fft,
        config.hop_length,
        config.win_length,
        window,
        center=True,
        pad_mode="constant",
        return_complex=True,
    )


def log_mel(audio: Tensor, config: MelConfig, *, sample_rate: int) -> Tensor:
    r"""Log band powers $\log\max(M\,|\mathrm{STFT}|^2, \epsilon)$.

    Frame ``t`` is centred at sample ``t * hop_length``; beyond the ends the recording
    is silent.

    Args:
        audio: (..., N) samples in [-1, 1].
        config: the grid.
        sample_rate: of ``audio`` in Hz; must be the grid's.

    Returns:
        (..., N // hop_length, num_mels).

    Raises:
        TypeError: integer samples.
        ValueError: another sample rate, less than one hop of samples, NaN.
    """
    check_audio(
        audio,
        sample_rate,
        expected_rate=config.sample_rate,
        min_samples=config.hop_length,
    )
    num_frames = audio.shape[-1] // config.hop_length
    flat = audio.reshape(-1, audio.shape[-1])
    power = _stft(flat, config)[..., :num_frames].abs().square()  # (B, F, T)
    weight = _filters(config).to(audio.device, audio.dtype)
    mel = (weight @ power).clamp(min=config.floor).log().transpose(-1, -2)
    return mel.reshape(*audio.shape[:-1], num_frames, config.num_mels)


def _magnitude(mel: Tensor, config: MelConfig, num_steps: int) -> Tensor:
    """Non-negative spectrum whose bands have the given log powers, (B, F, T)."""
    weight = _filters(config).to(mel.device, mel.dtype)
    target = mel.exp().transpose(-1, -2)  # (B, M, T)
    # Least squares under positivity by multiplicative updates (Lee and Seung 2001);
    # the start spreads each band over its bins.
    power = weight.mT @ (target / weight.sum(1, keepdim=True)) + config.floor
    numerator, gram = weight.mT @ target, weight.mT @ weight
    for _ in range(num_steps):
        power = power * numerator / (gram @ power).clamp(min=1e-12)
    return power.sqrt()


def griffin_lim(
    mel: Tensor,
    config: MelConfig,
    *,
    num_steps: int = 32,
    momentum: float = 0.99,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Audio whose log-mel frames come close to the given ones.

    The band powers are spread over the bins, then phases are found by projecting in
    turn on spectra with these magnitudes and on spectra that some signal has
    (Griffin and Lim 1984), with the momentum of Perraudin et al. 2013.

    Args:
        mel: (..., T, num_mels) log-mel frames.
        config: the grid they were made on.
        num_steps: iterations.
        momentum: 0 gives the plain algorithm; below 1.
        generator: of the first phases, on any device; the CPU's if ``None``.

    Returns:
        (..., T * hop_length) samples.

    Raises:
        ValueError: no frames, another number of bands, NaN, momentum outside [0, 1).

    Source:
        The paper's vocoder is not public; this one has no parameters to train.
    """
    if mel.ndim < 2 or mel.shape[-1] != config.num_mels or mel.shape[-2] < 1:
        raise ValueError(
            f"mel of shape {tuple(mel.shape)}: expected (..., T >= 1, "
            f"{config.num_mels}) frames"
        )
    if not torch.isfinite(mel).all():
        raise ValueError("mel holds NaN or infinite values")
    if mel.max() > _LOUDEST:
        raise ValueError(
            f"mel reaches {float(mel.max()):.0f}: samples in [-1, 1] stay below "
            f"{_LOUDEST:.0f}, so these are not log powers of such samples"
        )
    if not 0 <= momentum < 1 or num_steps < 1:
        raise ValueError(
            f"momentum={momentum}, num_steps={num_steps}: need 0 <= momentum < 1 and "
            "at least one step"
        )
    flat = mel.reshape(-1, *mel.shape[-2:])
    flat = torch.cat([flat, flat[:, -1:]], 1)  # istft wants the frame at the end too
    magnitude = _magnitude(flat, config, 30)
    length = mel.shape[-2] * config.hop_length
    window = torch.hann_window(config.win_length, device=mel.device, dtype=mel.dtype)
    device = "cpu" if generator is None else generator.device
    phase = torch.rand(
        magnitude.shape, generator=generator, device=device, dtype=mel.dtype
    )
    phase = (2 * math.pi * phase).to(mel.device)
    angles = torch.polar(torch.ones_like(phase), phase)
    previous = torch.zeros_like(angles)
    for _ in range(num_steps):
        audio = torch.istft(
            magnitude * angles,
            config.n_fft,
            config.hop_length,
            config.win_length,
            window,
            length=length,
        )
        rebuilt = _stft(audio, config)
        angles = rebuilt - momentum / (1 + momentum) * previous
        angles = angles / angles.abs().clamp(min=1e-12)
        previous = rebuilt
    audio = torch.istft(
        magnitude * angles,
        config.n_fft,
        config.hop_length,
        config.win_length,
        window,
        length=length,
    )
    return audio.reshape(*mel.shape[:-2], length)
