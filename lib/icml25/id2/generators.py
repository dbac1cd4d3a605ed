"""The six small image-to-image models A to F, as diffusers components."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .autoencoders import TAEF2_CHANNELS, decode, encode
from .diffusion import img2img_latents

TEXT_DIM = 64
NUM_TOKENS = 12


@dataclass(frozen=True)
class GeneratorConfig:
    """One model of the family; everything a checkpoint needs to be rebuilt."""

    code: str  # A is the seen model, B to F are unseen
    latent: str  # autoencoder: "taef2", "pca" or "kl"
    network: str  # "unet" or "transformer"
    widths: tuple[int, ...]  # channels a level; layers, heads, head size
    objective: str  # "epsilon", "v_prediction" or "flow"
    sampler: str  # diffusers scheduler that translates
    strength: float  # share of the noising path in its translations
    guidance: float  # weight of classifier-free guidance
    num_steps: int = 16  # of the whole path
    train_steps: int = 300
    batch_size: int = 64
    lr: float = 1e-3
    ema: float = 0.995  # decay of the averaged weights, which are kept


FAMILY = {
    config.code: config
    for config in (
        GeneratorConfig(
            *("A", "taef2", "unet", (48, 64), "epsilon"),
            *("DDIMScheduler", 0.8, 3.0),
            train_steps=600,
        ),
        GeneratorConfig(
            *("B", "taef2", "unet", (32, 48), "v_prediction"),
            *("DPMSolverMultistepScheduler", 0.8, 3.0),
            train_steps=800,
        ),
        GeneratorConfig(
            *("C", "pca", "unet", (32, 48), "epsilon"),
            *("DDIMScheduler", 0.45, 1.5),
            train_steps=1350,
        ),
        GeneratorConfig(
            *("D", "taef2", "transformer", (3, 4, 24), "flow"),
            *("FlowMatchEulerDiscreteScheduler", 0.8, 3.0),
            train_steps=600,
        ),
        GeneratorConfig(
            *("E", "kl", "unet", (32, 48), "epsilon"),
            *("EulerDiscreteScheduler", 0.35, 2.0),
            train_steps=1650,
        ),
        GeneratorConfig(
            *("F", "kl", "unet", (32, 48), "v_prediction"),
            *("DDIMScheduler", 0.45, 2.0),
            train_steps=1650,
        ),
    )
}
LATENT_SHAPES = {
    "taef2": (TAEF2_CHANNELS, 4, 4),
    "pca": (32, 4, 4),
    "kl": (16, 4, 4),
}


def make_kl_vae() -> nn.Module:
    """Our own small ``AutoencoderKL``: 3 x 32 x 32 to 16 x 4 x 4, random weights."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=(8, 16, 32, 64),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=8,
        sample_size=32,
        scaling_factor=1.0,
    )


def make_tokenizer(words: list[str]) -> Any:
    """A word-level tokenizer of transformers over ``words`` (ids are places)."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {word: place for place, word in enumerate(words)}
    core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>",
        special_tokens=[("<start>", ids["<start>"]), ("<end>", ids["<end>"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<start>",
        eos_token="<end>",
        model_max_length=NUM_TOKENS,
    )


def make_text_encoder(words: list[str]) -> nn.Module:
    """A two-layer, 64-wide ``CLIPTextModel`` with random weights."""
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(words),
            hidden_size=TEXT_DIM,
            intermediate_size=128,
            projection_dim=TEXT_DIM,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=NUM_TOKENS,
            pad_token_id=0,
            bos_token_id=2,
            eos_token_id=3,
        )
    )


def make_denoiser(config: GeneratorConfig) -> nn.Module:
    """The denoising network of a model with random weights."""
    channels, size, _ = LATENT_SHAPES[config.latent]
    if config.network == "transformer":
        from diffusers import SD3Transformer2DModel

        layers, heads, head_dim = config.widths
        return SD3Transformer2DModel(
            sample_size=size,
            patch_size=1,
            in_channels=channels,
            out_channels=channels,
            num_layers=layers,
            num_attention_heads=heads,
            attention_head_dim=head_dim,
            joint_attention_dim=TEXT_DIM,
            caption_projection_dim=heads * head_dim,
            pooled_projection_dim=TEXT_DIM,
            pos_embed_max_size=size,
        )
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=size,
        in_channels=channels,
        out_channels=channels,
        down_block_types=["CrossAttnDownBlock2D"] * len(config.widths),
        up_block_types=["CrossAttnUpBlock2D"] * len(config.widths),
        block_out_channels=config.widths,
        layers_per_block=1,
        cross_attention_dim=TEXT_DIM,
        attention_head_dim=4,
        norm_num_groups=8,
        time_embedding_dim=128,
    )


def make_scheduler(
    config: GeneratorConfig, name: str | None = None, *, steps_offset: int = 0
) -> Any:
    """The model's sampler, with the noise levels and target it was trained for.

    Args:
        config: which model.
        name: another diffusers scheduler in its place.
        steps_offset: added to DDIM's timesteps; the released pipelines use 1.
    """
    import diffusers

    kind = getattr(diffusers, name or config.sampler)
    if config.objective == "flow":
        return kind()
    options = {
        "beta_schedule": "squaredcos_cap_v2" if config.code == "B" else "scaled_linear",
        "prediction_type": config.objective,
    }
    if options["beta_schedule"] == "scaled_linear":
        options |= {"beta_start": 0.00085, "beta_end": 0.012}
    if kind is diffusers.DDIMScheduler:
        options |= {"clip_sample": False, "set_alpha_to_one": True}
        options["steps_offset"] = steps_offset
    return kind(**options)


class Generator(nn.Module):
    """A text-guided image-to-image model: autoencoder, denoiser, text encoder, sampler.

    Args:
        config: which model.
        vae: its autoencoder (shared between models, frozen).
        words: the vocabulary; a word's place is its id.

    Source: the assembly of ``StableDiffusionImg2ImgPipeline``; :meth:`pipeline` returns
    that very class where the components allow it.
    """

    def __init__(
        self, config: GeneratorConfig, vae: nn.Module, words: list[str]
    ) -> None:
        super().__init__()
        self.config, self.words = config, words
        self.vae = vae
        self.denoiser = make_denoiser(config)
        self.text = make_text_encoder(words)
        self.tokenizer = make_tokenizer(words)
        channels = LATENT_SHAPES[config.latent][0]
        self.register_buffer("shift", torch.zeros(channels, 1, 1))
        self.register_buffer("scale", torch.ones(channels, 1, 1))

    def trained(self) -> nn.ModuleDict:
        """The two networks that training changes."""
        return nn.ModuleDict({"denoiser": self.denoiser, "text": self.text})

    def tokens(self, prompts: list[str]) -> Tensor:
        """(N, 12) token ids on the model's device; "" is the empty prompt."""
        encoded = self.tokenizer(
            prompts,
            padding="max_length",
            truncation=True,
            max_length=NUM_TOKENS,
            return_tensors="pt",
        )
        return encoded.input_ids.to(self.shift.device)

    def read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids -> states (N, 12, 64) and their summary (N, 64)."""
        output = self.text(tokens)
        return output.last_hidden_state, output.pooler_output

    def predict(self, x: Tensor, t: Tensor, cond: tuple[Tensor, Tensor]) -> Tensor:
        """The denoiser's answer, whichever network it is."""
        if self.config.network == "transformer":
            return self.denoiser(
                hidden_states=x,
                timestep=t,
                encoder_hidden_states=cond[0],
                pooled_projections=cond[1],
            ).sample
        return self.denoiser(x, t, encoder_hidden_states=cond[0]).sample

    @torch.no_grad()
    def translate(
        self,
        images: Tensor,
        prompts: list[str],
        *,
        generator: torch.Generator | None = None,
        strength: float | None = None,
        batch_size: int = 128,
    ) -> Tensor:
        """Image-to-image translations, (N, 3, H, W) in [0, 1], rounded to 8 bits.

        Args:
            images: (N, 3, H, W) in [0, 1].
            prompts: N prompts.
            generator: draws the noise; on the CPU, so that devices agree.
            strength: default: the model's own.
            batch_size: images translated at once.

        Raises:
            ValueError: no image, not one prompt an image, a batch below 1, an
                autoencoder of other channels than the denoiser's; and as ``encode``
                and ``img2img_latents`` do.
        """
        if len(images) == 0 or len(prompts) != len(images) or batch_size < 1:
            raise ValueError(
                f"{len(images)} images, {len(prompts)} prompts, batch_size="
                f"{batch_size}: give one prompt an image, and at least 1 of each"
            )
        scheduler = make_scheduler(self.config)
        done = []
        for start in range(0, len(images), batch_size):
            part = slice(start, start + batch_size)
            z = encode(self.vae, images[part])
            if z.shape[1] != len(self.shift):
                raise ValueError(
                    f"model {self.config.code} denoises {len(self.shift)} channels, "
                    f"its autoencoder gives {z.shape[1]}"
                )
            z = (z - self.shift) / self.scale
            texts = prompts[part]
            out = img2img_latents(
                self.predict,
                scheduler,
                z,
                cond=self.read(self.tokens(texts)),
                uncond=self.read(self.tokens([""] * len(texts))),
                noise=torch.randn(z.shape, generator=generator).to(z),
                strength=self.config.strength if strength is None else strength,
                guidance=self.config.guidance,
                num_steps=self.config.num_steps,
            )
            done.append(decode(self.vae, out * self.scale + self.shift))
        return (torch.cat(done) * 255).round() / 255

    def pipeline(self, scheduler: str = "DDIMScheduler") -> Any:
        """The components as diffusers' own ``StableDiffusionImg2ImgPipeline``.

        Raises:
            ValueError: the model is not a UNet over an ``AutoencoderKL``.
        """
        from transformers.utils import logging

        if self.config.latent != "kl" or self.config.network != "unet":
            raise ValueError(
                f"model {self.config.code}: the pipeline takes a UNet over an "
                f"AutoencoderKL, not {self.config.network} over {self.config.latent}"
            )
        # Loading it reports image processors that torchvision brings; none is used.
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            from diffusers import StableDiffusionImg2ImgPipeline
        finally:
            logging.set_verbosity(verbosity)

        pipe = StableDiffusionImg2ImgPipeline(
            vae=self.vae,
            text_encoder=self.text,
            tokenizer=self.tokenizer,
            unet=self.denoiser,
            scheduler=make_scheduler(self.config, scheduler, steps_offset=1),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        pipe.set_progress_bar_config(disable=True)
        return pipe
