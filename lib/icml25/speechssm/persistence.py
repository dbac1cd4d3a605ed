"""Experiment C, second part: is the voice of a prompt kept over a long time?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from icml25.core import make_generator

from .audio import griffin_lim, log_mel
from .decoder import DecoderConfig, PromptedMelDecoder, prompt_vector
from .joins import ReadingTask, prepare_reading
from .recordings import ReadingConfig
from .tokens import KMeansTokenizer, TokenizerConfig
from .voices import SpeakerSpace, similarity_over_time
from .windows import decode_long, tokenize_long

__all__ = [
    "VoiceConfig",
    "measure_voices",
    "run_voices",
    "shipped_voices",
    "speaker_space",
    "train_decoders",
]

_SHIPPED = Path(__file__).parent / "assets" / "decoder-voices.safetensors"


@dataclass(frozen=True)
class VoiceConfig:
    """The prompted decoder and the voice over time."""

    source: str = "espeak"
    reading: ReadingConfig = ReadingConfig(num_train=100, num_long=6, long_s=45.0)
    tokenizer: TokenizerConfig = TokenizerConfig(
        vocab_size=200, context=0, num_cepstra=18
    )
    decoder: DecoderConfig = DecoderConfig()
    window: int = 256  # tokens of a decoding window
    overlap: int = 32
    span_s: float = 10.0  # a similarity is measured on so much speech
    through_sound: bool = False  # measure on decoded sound instead of decoded frames
    num_steps_gl: int = 24  # Griffin-Lim iterations
    save: bool = False  # keep tokeniser, decoders and speaker space in the package


LAPTOP_VOICES = VoiceConfig()
SHIPPED_VOICES = VoiceConfig(
    reading=ReadingConfig(num_train=200, num_long=6, long_s=45.0),
    decoder=DecoderConfig(num_steps=400),
    save=True,
)
RECORDED_VOICES = VoiceConfig(
    source="librispeech", decoder=DecoderConfig(num_steps=400), through_sound=True
)


def run_voices(
    config: VoiceConfig = LAPTOP_VOICES,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Whether the voice of a 3-second prompt is kept over a long reading.

    Tokens of readings by voices that no training clip has are decoded with the prompt
    of their own voice, and without a prompt by an equal network that never had one.

    Args:
        config: sizes.
        device: where the decoder is trained and run.
        seed: of voices, texts, weights and batches.

    Returns:
        ``error``: mean absolute error of normalised frames ``with_prompt``,
        ``without_prompt`` and of the ``mean_frame``. ``similarity``: cosines to the
        prompt over time (mean over readings): ``real`` speech, ``own`` prompt, ``none``
        (no prompt); ``others``: mean cosine to the other voices' prompts of real
        speech and of the prompted decoding. ``swap``: [i][j] cosine of reading 0's
        tokens spoken with prompt i to the real voice j.
    """
    generator = make_generator(seed)
    task = prepare_reading(
        config.source, config.reading, config.tokenizer, generator=generator
    )
    decoders = train_decoders(task, config, generator=generator, device=device)
    space = speaker_space(task)
    if config.save:
        _save(task.tokenizer, *decoders, space)
    return measure_voices(task, *decoders, config, space=space, generator=generator)


def speaker_space(task: ReadingTask) -> SpeakerSpace:
    """The directions in which the voices of the training clips differ."""
    return SpeakerSpace([m for m in task.train_mels if len(m) >= 400])


def _save(
    tokenizer: KMeansTokenizer,
    prompted: PromptedMelDecoder,
    plain: PromptedMelDecoder,
    space: SpeakerSpace,
) -> None:
    from safetensors.torch import save_file

    parts = {
        "tokenizer": tokenizer.state_dict(),
        "prompted": {k: v.half() for k, v in prompted.state_dict().items()},
        "plain": {k: v.half() for k, v in plain.state_dict().items()},
        "space": space.state_dict(),
    }
    flat = {
        f"{part}/{name}": tensor.detach().cpu().contiguous()
        for part, tensors in parts.items()
        for name, tensor in tensors.items()
    }
    _SHIPPED.parent.mkdir(exist_ok=True)
    save_file(flat, _SHIPPED)


def shipped_voices(
    reading: ReadingConfig | None = None,
    *,
    seed: int = 1_000,
    device: torch.device | str = "cpu",
) -> tuple[ReadingTask, PromptedMelDecoder, PromptedMelDecoder, SpeakerSpace]:
    """Readings by unseen voices, and decoders trained as in ``SHIPPED_VOICES``.

    Made by ``python -m icml25 run speechssm voices-shipped``.

    Args:
        reading: how much is read; default four readings of 40 s, no training clips.
        seed: of voices and sentences of the readings.
        device: of the decoders.

    Returns:
        The readings, the decoder with prompts, the one without, the speaker space.
    """
    from safetensors.torch import load_file

    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(_SHIPPED).items():
        part, name = key.split("/")
        parts.setdefault(part, {})[name] = tensor
    config = SHIPPED_VOICES
    tokenizer = KMeansTokenizer.from_state(config.tokenizer, parts["tokenizer"])
    task = prepare_reading(
        "espeak",
        reading or ReadingConfig(num_train=0, num_long=4, long_s=40.0),
        tokenizer,
        generator=make_generator(seed),
    )
    decoders = []
    for name in ("prompted", "plain"):
        decoder = PromptedMelDecoder(
            tokenizer.vocab_size,
            task.grid.num_mels,
            replace(config.decoder, use_prompt=name == "prompted"),
            frames_per_token=tokenizer.min_frames,
            generator=make_generator(0),
        )
        decoder.load_state_dict({k: v.float() for k, v in parts[name].items()})
        decoders.append(decoder.eval().to(device))
    return task, *decoders, SpeakerSpace.from_state(parts["space"])


def train_decoders(
    task: ReadingTask,
    config: VoiceConfig,
    *,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> tuple[PromptedMelDecoder, PromptedMelDecoder]:
    """Two equal networks on the training clips: with prompts, and without."""
    ids = [task.tokenizer.encode(m) for m in task.train_mels]
    made = []
    for use_prompt in (True, False):
        decoder = PromptedMelDecoder(
            task.tokenizer.vocab_size,
            task.grid.num_mels,
            replace(config.decoder, use_prompt=use_prompt),
            frames_per_token=task.tokenizer.min_frames,
            generator=generator,
        ).to(device)
        made.append(
            decoder.fit(ids, task.train_mels, task.train_mels, generator=generator)
        )
    return made[0], made[1]


def measure_voices(
    task: ReadingTask,
    prompted: PromptedMelDecoder,
    plain: PromptedMelDecoder,
    config: VoiceConfig,
    *,
    space: SpeakerSpace,
    generator: torch.Generator,
) -> dict[str, Any]:
    """The measurements of ``run_voices`` on trained decoders."""
    device = prompted.mel_mean.device
    size = config.decoder.prompt_frames
    long_ids = [
        tokenize_long(
            m, task.tokenizer, window=config.window, overlap=config.overlap
        ).to(device)
        for m in task.long_mels
    ]
    prompts = [prompt_vector(m[:size]).to(device) for m in task.long_mels]
    voices = torch.stack([space(m[:size]) for m in task.long_mels])

    def say(ids: Tensor, decoder: PromptedMelDecoder, prompt: Tensor) -> Tensor:
        with torch.inference_mode():
            mel = decode_long(
                ids,
                lambda x: decoder(x, prompt),
                vocab_size=decoder.vocab_size,
                window=config.window,
                overlap=config.overlap,
                frames_per_token=decoder.frames_per_token,
            )
        if not config.through_sound:
            return mel.cpu()
        audio = griffin_lim(
            mel, task.grid, num_steps=config.num_steps_gl, generator=generator
        )
        return log_mel(audio, task.grid, sample_rate=task.grid.sample_rate).cpu()

    span = int(config.span_s * task.grid.frame_rate)
    errors: dict[str, list[float]] = {"with_prompt": [], "without_prompt": []}
    mean_frame, curves, others = [], {"real": [], "own": [], "none": []}, {}
    for n, (mel, ids) in enumerate(zip(task.long_mels, long_ids, strict=True)):
        errors["with_prompt"].append(prompted.error(ids, mel.to(device), prompts[n]))
        errors["without_prompt"].append(plain.error(ids, mel.to(device), None))
        normal = (mel.to(device) - prompted.mel_mean) / prompted.mel_std
        mean_frame.append(float(normal.abs().mean()))
        spoken = {
            "real": mel[size:],
            "own": say(ids, prompted, prompts[n])[size:],
            "none": say(ids, plain, prompts[n])[size:],
        }
        for name, frames in spoken.items():
            curves[name].append(
                similarity_over_time(frames, voices[n], space, window=span)
            )
            rest = torch.cat([voices[:n], voices[n + 1 :]])
            others.setdefault(name, []).append(float((rest @ space(frames)).mean()))
    shortest = min(len(c) for c in curves["real"])
    excerpt = long_ids[0][: int(config.span_s * 25)]
    swap = [
        (voices @ space(say(excerpt, prompted, prompt))).tolist() for prompt in prompts
    ]
    return {
        "error": {
            **{name: _mean(values) for name, values in errors.items()},
            "mean_frame": _mean(mean_frame),
        },
        "similarity": {
            name: [_mean([row[t] for row in rows]) for t in range(shortest)]
            for name, rows in curves.items()
        },
        "others": {name: _mean(values) for name, values in others.items()},
        "span_s": config.span_s,
        "speakers": [r.speaker for r in task.long],
        "swap": swap,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
