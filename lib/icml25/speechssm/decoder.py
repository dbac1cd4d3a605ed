"""Tokens to speech: the voice comes from a prompt, not from the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .tokens import check_ids

__all__ = ["DecoderConfig", "PromptedMelDecoder", "prompt_vector", "train_decoder"]

_MAX_DEVIATION = 6.0  # standard deviations of a mel band
_MAX_VOICE = 3.0  # standard deviations of a number of the prompt


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and training of the decoder."""

    embed_dim: int = 64
    width: int = 96  # channels
    kernel: int = 5  # tokens a layer sees
    num_layers: int = 3
    use_prompt: bool = True  # False: the same network without a voice to imitate
    prompt_frames: int = 300  # 3 s, as in the paper
    num_steps: int = 120
    batch_size: int = 16
    crop: int = 80  # tokens of a training stretch
    lr: float = 5e-3  # cosine to 0


def prompt_vector(mel: Tensor) -> Tensor:
    """What a prompt says of its voice: mean and deviation of each mel band.

    Args:
        mel: (..., T, M) log-mel frames of a few seconds.

    Returns:
        (..., 2 M).

    Raises:
        ValueError: no frames, NaN.
    """
    if mel.ndim < 2 or mel.shape[-2] < 1:
        raise ValueError(f"mel of shape {tuple(mel.shape)}: the prompt is empty")
    if not torch.isfinite(mel).all():
        raise ValueError("the prompt holds NaN or infinite values")
    return torch.cat([mel.mean(-2), mel.std(-2, correction=0)], -1)


class PromptedMelDecoder(nn.Module):
    """Convolutions from tokens to mel frames, steered by a prompt at every layer.

    Token embeddings plus a linear map of the prompt; residual convolutions whose
    channels are scaled and shifted by further linear maps of the prompt (FiLM); a
    linear map to the frames of each token, to which the prompt adds one level a band.

    Shapes: ``B`` batch, ``L`` tokens, ``M`` mel bands, ``f`` frames per token.

    Args:
        vocab_size: of the tokens.
        num_mels: bands.
        config: sizes.
        frames_per_token: f.
        generator: of the weights.

    Notes:
        The receptive field is ``radius`` tokens on either side.

    Source:
        Takes the place of the paper's SoundStorm and SoundStream, which are not public;
        as there, the voice of a 3-second prompt enters here and only here.
    """

    def __init__(
        self,
        vocab_size: int,
        num_mels: int,
        config: DecoderConfig = DecoderConfig(),
        *,
        frames_per_token: int = 4,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        if config.kernel % 2 == 0:
            raise ValueError(f"kernel={config.kernel}: must be odd")
        self.config, self.vocab_size = config, vocab_size
        self.num_mels, self.frames_per_token = num_mels, frames_per_token
        c = config
        self.embed = nn.Embedding(vocab_size, c.embed_dim)
        self.enter = nn.Conv1d(c.embed_dim, c.width, 1)
        self.voice = nn.Linear(2 * num_mels, c.width)
        self.convs = nn.ModuleList(
            nn.Conv1d(c.width, c.width, c.kernel, padding=c.kernel // 2)
            for _ in range(c.num_layers)
        )
        self.film = nn.ModuleList(
            nn.Linear(2 * num_mels, 2 * c.width) for _ in range(c.num_layers)
        )
        self.leave = nn.Conv1d(c.width, frames_per_token * num_mels, 1)
        self.level = nn.Linear(2 * num_mels, num_mels, bias=False)  # of every frame
        # Of the training frames and prompts; set by `fit`.
        self.register_buffer("mel_mean", torch.zeros(num_mels))
        self.register_buffer("mel_std", torch.ones(num_mels))
        self.register_buffer("prompt_mean", torch.zeros(2 * num_mels))
        self.register_buffer("prompt_std", torch.ones(2 * num_mels))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim == 1:
                    parameter.zero_()
                    continue
                fan_in = 1 if name == "embed.weight" else parameter[0].numel()
                # The prompt enters through weights that start at zero: training
                # begins at the network without one.
                gain = float(not name.startswith(("film", "voice", "level")))
                fresh = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(gain * fresh / fan_in**0.5)

    @property
    def radius(self) -> int:
        """Tokens on either side that a frame depends on."""
        return self.config.num_layers * (self.config.kernel // 2)

    def _voice(self, prompt: Tensor | None, batch: int) -> Tensor:
        if not self.config.use_prompt or prompt is None:
            return self.prompt_mean.new_zeros(batch, 2 * self.num_mels)
        if prompt.shape[-1] != 2 * self.num_mels or prompt.ndim > 2:
            raise ValueError(
                f"prompt of shape {tuple(prompt.shape)}: expected "
                f"({2 * self.num_mels},) or (B, {2 * self.num_mels})"
            )
        if not torch.isfinite(prompt).all():
            raise ValueError("prompt holds NaN or infinite values")
        normal = (prompt - self.prompt_mean) / self.prompt_std
        # No stranger lies further out than the voices of training do, and the maps of
        # the 2 M numbers, which move together, start with outputs of order one: with
        # the raw numbers one optimiser step moves a channel's scale by itself.
        bounded = _MAX_VOICE * torch.tanh(normal / _MAX_VOICE)
        return (bounded / (2 * self.num_mels) ** 0.5).expand(batch, -1)

    def _normal(self, ids: Tensor, prompt: Tensor | None) -> Tensor:
        voice = self._voice(prompt, len(ids))  # (B, 2M)
        x = self.enter(self.embed(ids).transpose(1, 2))  # (B, C, L)
        x = x + self.voice(voice)[..., None]
        for conv, film in zip(self.convs, self.film, strict=True):
            scale, shift = film(voice)[..., None].chunk(2, 1)
            x = x + F.gelu((1 + scale.tanh()) * conv(x) + shift)
        out = self.leave(x).transpose(1, 2)  # (B, L, f M)
        frames = out.reshape(len(ids), -1, self.num_mels)
        return frames + self.level(voice)[:, None]

    def forward(self, ids: Tensor, prompt: Tensor | None = None) -> Tensor:
        """Log-mel frames of tokens in the voice of the prompt.

        Args:
            ids: (B, L) tokens.
            prompt: (2M,) or (B, 2M) from ``prompt_vector``; None for the mean voice.

        Returns:
            (B, L f, M).

        Raises:
            IndexError: an id outside the vocabulary.
            ValueError: no ids, a prompt of another shape, NaN in it.
        """
        check_ids(ids, self.vocab_size)
        if ids.ndim != 2:
            raise ValueError(f"ids of shape {tuple(ids.shape)}: expected (B, L)")
        # No voice may drive the frames beyond what training frames ever were.
        normal = self._normal(ids, prompt).clamp(-_MAX_DEVIATION, _MAX_DEVIATION)
        return normal * self.mel_std + self.mel_mean

    def fit(
        self,
        ids: Sequence[Tensor],
        mels: Sequence[Tensor],
        prompts: Sequence[Tensor],
        *,
        generator: torch.Generator,
    ) -> PromptedMelDecoder:
        """Train by absolute error of the normalised log-mel frames.

        Args:
            ids: (L_n,) tokens of each recording.
            mels: (>= L_n f, M) its frames.
            prompts: (T, M) frames to take its prompts from: other speech of the same
                voice, or the recording itself.
            generator: of the stretches drawn.

        Returns:
            Itself, in evaluation mode.

        Raises:
            ValueError: lists of different or no length, no recording as long as
                ``config.crop`` tokens, prompts shorter than ``config.prompt_frames``.
        """
        c, f = self.config, self.frames_per_token
        if not len(ids) == len(mels) == len(prompts) > 0:
            raise ValueError(
                f"{len(ids)} token rows, {len(mels)} recordings, {len(prompts)} "
                "prompts: give as many of each, and at least one"
            )
        use = [n for n, row in enumerate(ids) if len(row) >= c.crop]
        if not use:
            raise ValueError(f"no recording is as long as a crop of {c.crop} tokens")
        if min(len(prompts[n]) for n in use) < c.prompt_frames:
            raise ValueError(f"a prompt is shorter than {c.prompt_frames} frames")
        frames = torch.cat([mels[n] for n in use])
        self.mel_mean.copy_(frames.mean(0))
        self.mel_std.copy_(frames.std(0))
        # All prompts at once, from running sums: (mean, deviation) of any stretch.
        voices = torch.cat(
            [prompt_vector(prompts[n][: c.prompt_frames].to(frames))[None] for n in use]
        )
        self.prompt_mean.copy_(voices.mean(0))
        self.prompt_std.copy_(voices.std(0, correction=0) + 0.1)
        if c.use_prompt:  # begin with the bands of the prompt as they are
            own_level = self.prompt_std[: self.num_mels] / self.mel_std
            own_level = own_level * (2 * self.num_mels) ** 0.5  # as `_voice` divides
            self.level.weight.data[:, : self.num_mels] = own_level.diag()
        token_start, flat_ids = _flatten([ids[n] for n in use])
        frame_start, flat_mel = _flatten([mels[n][: len(ids[n]) * f] for n in use])
        prompt_start, flat_prompt = _flatten([prompts[n] for n in use])
        length = torch.tensor([len(ids[n]) for n in use])
        room = torch.tensor([len(prompts[n]) for n in use]) - c.prompt_frames + 1
        device = self.mel_mean.device
        optimizer = torch.optim.AdamW(self.parameters(), c.lr, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, c.lr, total_steps=c.num_steps, pct_start=0.1
        )
        self.train()
        for _ in range(c.num_steps):
            row = torch.randint(len(use), (c.batch_size,), generator=generator)
            u, v = torch.rand(2, c.batch_size, generator=generator)
            start = (u * (length[row] - c.crop + 1)).long()
            at = (token_start[row] + start)[:, None] + torch.arange(c.crop)
            first = frame_start[row] + start * f
            target = flat_mel[first[:, None] + torch.arange(c.crop * f)].to(device)
            begin = prompt_start[row] + (v * room[row]).long()
            heard = flat_prompt[begin[:, None] + torch.arange(c.prompt_frames)]
            mel = self._normal(flat_ids[at].to(device), prompt_vector(heard).to(device))
            loss = (mel - (target - self.mel_mean) / self.mel_std).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        return self.eval()

    @torch.inference_mode()
    def error(self, ids: Tensor, mel: Tensor, prompt: Tensor | None) -> float:
        """Mean absolute error of normalised frames, as in training.

        Args:
            ids: (L,) tokens; mel: (>= L f, M) true frames; prompt: (2M,).
        """
        wanted = mel[: len(ids) * self.frames_per_token]
        made = self._normal(ids[None], prompt)[0]
        return float((made - (wanted - self.mel_mean) / self.mel_std).abs().mean())


def _flatten(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    return lengths.cumsum(0) - lengths, torch.cat(list(rows))


def train_decoder(
    ids: Sequence[Tensor],
    mels: Sequence[Tensor],
    config: DecoderConfig = DecoderConfig(),
    *,
    vocab_size: int,
    prompts: Sequence[Tensor] | None = None,
    generator: torch.Generator,
) -> PromptedMelDecoder:
    """A decoder trained on recordings; each is its own prompt unless told otherwise."""
    decoder = PromptedMelDecoder(
        vocab_size, mels[0].shape[-1], config, generator=generator
    )
    return decoder.fit(
        ids, mels, mels if prompts is None else prompts, generator=generator
    )
