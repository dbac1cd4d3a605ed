"""ID2: which photograph was this image made from, by whichever diffusion model?"""

from .autoencoders import TAEF2, embed, load_taef2
from .diffusion import img2img_latents, telescoping_residual
from .experiments import EXPERIMENTS
from .linear import (
    LinearIdentifier,
    PairScatter,
    lda_transform,
    whitening_transform,
)
from .margin import CosFaceHead, train_cosface
from .packing import load_features, load_generator
from .ranking import map_acc, rank_of_positive, topk
from .theory import transfer_constant

__all__ = [
    "EXPERIMENTS",
    "TAEF2",
    "CosFaceHead",
    "LinearIdentifier",
    "PairScatter",
    "embed",
    "img2img_latents",
    "lda_transform",
    "load_features",
    "load_generator",
    "load_taef2",
    "map_acc",
    "rank_of_positive",
    "telescoping_residual",
    "topk",
    "train_cosface",
    "transfer_constant",
    "whitening_transform",
]
