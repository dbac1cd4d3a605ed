"""Speech synthesised by eSpeak NG, in a process of its own.

The library keeps its filters from one utterance to the next and offers no way to reset
them. A fresh process for each list of utterances, with the library's random numbers
seeded, makes the sound a function of the list alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["SAMPLE_RATE", "Utterance", "synthesise"]

SAMPLE_RATE = 16_000  # Hz, of what `synthesise` returns

# Runs in the child: no torch, no package import, ready in a tenth of a second.
_CHILD = r"""
import ctypes, json, sys
import numpy as np
import espeakng_loader as loader

lib = ctypes.CDLL(loader.get_library_path())
rate = lib.espeak_Initialize(2, 0, loader.get_data_path().encode(), 0x8001)
if rate <= 0:
    sys.exit("eSpeak NG did not start")
chunks = []
kind = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)

def collect(samples, count, events):
    if samples and count > 0:
        chunks.append(np.ctypeslib.as_array(samples, shape=(count,)).copy())
    return 0

callback = kind(collect)
lib.espeak_SetSynthCallback(callback)
sounds = []
for number, job in enumerate(json.load(sys.stdin)):
    chunks.clear()
    lib.espeak_ng_SetRandSeed(1 + number)  # some voices have noise in them
    if lib.espeak_SetVoiceByName(job["voice"].encode()):
        sys.exit("no such voice: %r" % job["voice"])
    lib.espeak_SetParameter(1, job["rate"], 0)
    lib.espeak_SetParameter(3, job["pitch"], 0)
    text = job["text"].encode()
    if lib.espeak_Synth(text, len(text) + 1, 0, 1, 0, 1, None, None):
        sys.exit("eSpeak NG refused %r" % job["text"])
    lib.espeak_Synchronize()
    sounds.append(np.concatenate(chunks) if chunks else np.zeros(0, np.int16))
head = [rate] + [len(s) for s in sounds]
sys.stdout.buffer.write((json.dumps(head) + "\n").encode())
sys.stdout.buffer.write(np.concatenate(sounds).astype("<i2").tobytes())
"""


@dataclass(frozen=True)
class Utterance:
    """One text in one voice."""

    text: str
    voice: str = "en-us"  # language, and after a plus sign the variant: "en-us+f3"
    rate: int = 170  # words a minute, 80 to 450
    pitch: int = 50  # 0 to 99

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError(f"text={self.text!r}: there is nothing to say")
        if not 80 <= self.rate <= 450 or not 0 <= self.pitch <= 99:
            raise ValueError(
                f"rate={self.rate}, pitch={self.pitch}: allowed are 80 to 450 words a "
                "minute and pitch 0 to 99"
            )


@lru_cache(maxsize=8)
def _synthesise(jobs: tuple[Utterance, ...]) -> tuple[Tensor, ...]:
    import numpy as np
    from scipy.signal import firwin, resample_poly

    # -I: the child must not see another `json` or `numpy` in the working folder.
    child = subprocess.run(
        [sys.executable, "-I", "-c", _CHILD],
        input=json.dumps([asdict(job) for job in jobs]).encode(),
        capture_output=True,
    )
    if child.returncode:
        message = child.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"speech synthesis failed: {message[-1] if message else ''}")
    head, _, body = child.stdout.partition(b"\n")
    rate, *lengths = json.loads(head)
    sound = np.frombuffer(body, dtype="<i2").astype(np.float32) / 32768
    pieces = np.split(sound, np.cumsum(lengths)[:-1])
    divisor = int(np.gcd(SAMPLE_RATE, rate))
    up, down = SAMPLE_RATE // divisor, rate // divisor
    low_pass = firwin(20 * max(up, down) + 1, 1 / max(up, down), window=("kaiser", 5))
    return tuple(
        torch.from_numpy(resample_poly(piece, up, down, window=low_pass)).float()
        for piece in pieces
    )


def synthesise(utterances: Sequence[Utterance]) -> list[Tensor]:
    """Say each text in its voice.

    The same list always gives the same samples. eSpeak NG varies its voice a little
    from utterance to utterance, so one text said twice in a list gives two takes.

    Args:
        utterances: what to say; at least one.

    Returns:
        One (N,) tensor an utterance: mono, 16 kHz, in [-1, 1].

    Raises:
        ValueError: an empty list.
        RuntimeError: ``espeakng-loader`` is not installed, or a voice is unknown.

    Notes:
        About a thousand times faster than real time; the last few lists are kept in
        memory. Nothing is written to disk.
    """
    if not utterances:
        raise ValueError("utterances is empty: give at least one")
    return [piece.clone() for piece in _synthesise(tuple(utterances))]
