"""Image-to-image translation in latent space, for any of diffusers' schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: (latents (N, C, H, W), timesteps (N,), condition) -> prediction (N, C, H, W)
Denoiser = Callable[[Tensor, Tensor, Any], Tensor]

#: Options under which a scheduler's steps telescope: each starts at the noise level
#: where the last one ended, the last one ends at 0, and nothing else touches x.
_TELESCOPES: dict[str, dict[str, Any]] = {
    "DDIMScheduler": {
        "prediction_type": "epsilon",
        "set_alpha_to_one": True,
        "clip_sample": False,
        "timestep_spacing": "leading",
        "thresholding": False,
        "rescale_betas_zero_snr": False,
    },
    "FlowMatchEulerDiscreteScheduler": {
        "stochastic_sampling": False,
        "invert_sigmas": False,
    },
}


@torch.no_grad()
def img2img_latents(
    denoiser: Denoiser,
    scheduler: Any,
    latents: Tensor,
    *,
    cond: Any,
    uncond: Any,
    noise: Tensor,
    strength: float = 0.8,
    guidance: float = 3.0,
    num_steps: int = 16,
    generator: torch.Generator | None = None,
    record: Callable[..., None] | None = None,
) -> Tensor:
    r"""Noise latents up to ``strength`` of the way, then denoise them under a prompt.

    What ``StableDiffusionImg2ImgPipeline`` does between its two autoencoder calls, for
    a whole batch, and for eps-, v- and flow-predicting models alike: the scheduler
    knows what the prediction means.

    Args:
        denoiser: called with (latents, timesteps, condition).
        scheduler: a diffusers scheduler; its state is reset.
        latents: (N, C, H, W), scaled as the model was trained.
        cond, uncond: conditions of N rows: a tensor, or a tuple of tensors.
        noise: (N, C, H, W), standard normal.
        strength: share of the path that is run, in (0, 1].
        guidance: weight of classifier-free guidance; 1 runs the prompt alone.
        num_steps: steps of the *whole* path; ``int(num_steps * strength)`` are run.
        generator: for schedulers that draw noise in each step.
        record: called as ``record(timestep, latents, prediction)`` in each step.

    Returns:
        (N, C, H, W) denoised latents.

    Raises:
        ValueError: shapes that differ, a strength outside (0, 1], no step left.
    """
    if latents.dim() != 4 or noise.shape != latents.shape:
        raise ValueError(
            f"latents={tuple(latents.shape)}, noise={tuple(noise.shape)}: both must be "
            "(N, C, H, W) of one shape"
        )
    if not 0 < strength <= 1:
        raise ValueError(f"strength={strength}: give a number in (0, 1]")
    num_run = min(int(num_steps * strength), num_steps)
    if num_run < 1:
        raise ValueError(
            f"strength={strength} of num_steps={num_steps} leaves no step to run"
        )
    scheduler.set_timesteps(num_steps, device=latents.device)
    first = (num_steps - num_run) * getattr(scheduler, "order", 1)
    timesteps = scheduler.timesteps[first:]
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(first)
    x = _add_noise(scheduler, latents, noise, timesteps[:1])
    extra = {"generator": generator} if _draws_noise(scheduler) else {}
    for t in timesteps:
        scaled = x
        if hasattr(scheduler, "scale_model_input"):
            scaled = scheduler.scale_model_input(x, t)
        prediction = guided(denoiser, scaled, t, cond, uncond, guidance)
        if record is not None:
            record(t, x, prediction)
        x = scheduler.step(prediction, t, x, **extra).prev_sample
    return x


def guided(
    denoiser: Denoiser, x: Tensor, t: Tensor, cond: Any, uncond: Any, guidance: float
) -> Tensor:
    """Classifier-free guidance with both halves in one call of the network."""
    if guidance == 1:
        return denoiser(x, t.expand(len(x)), cond)
    both = _join(uncond, cond)
    doubled = torch.cat([x, x])
    without, with_ = denoiser(doubled, t.expand(len(doubled)), both).chunk(2)
    return without + guidance * (with_ - without)


def diffusion_loss(
    denoiser: Denoiser,
    scheduler: Any,
    latents: Tensor,
    cond: Any,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Mean squared error of one random noise level an example.

    eps and v targets come from the scheduler; for a flow-matching scheduler the levels
    are logit-normal and the target is ``noise - latents``.
    """
    count = len(latents)
    noise = torch.randn(latents.shape, generator=generator, device=latents.device)
    if not hasattr(scheduler, "alphas_cumprod"):
        draw = torch.randn(count, generator=generator, device=latents.device)
        level = draw.sigmoid()[:, None, None, None]
        noisy = (1 - level) * latents + level * noise
        num_train = scheduler.config.num_train_timesteps
        prediction = denoiser(noisy, num_train * level.flatten(), cond)
        return torch.nn.functional.mse_loss(prediction, noise - latents)
    num_train = scheduler.config.num_train_timesteps
    t = torch.randint(num_train, (count,), generator=generator, device=latents.device)
    keep = scheduler.alphas_cumprod.to(latents.device)[t][:, None, None, None]
    noisy = keep.sqrt() * latents + (1 - keep).sqrt() * noise
    target = noise
    if scheduler.config.prediction_type == "v_prediction":
        target = keep.sqrt() * noise - (1 - keep).sqrt() * latents
    return torch.nn.functional.mse_loss(denoiser(noisy, t, cond), target)


@torch.no_grad()
def telescoping_residual(
    denoiser: Denoiser,
    scheduler: Any,
    latents: Tensor,
    *,
    cond: Any,
    uncond: Any,
    noise: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    r"""Translation minus its telescoped form, and how far the translation went.

    For deterministic DDIM with $\sigma_t=\sqrt{(1-\bar\alpha_t)/\bar\alpha_t}$,

    $$\hat z_0 - z_0 = \sum_t (\sigma_t - \sigma_{t-1})\,(\epsilon - \epsilon_t),$$

    with $\epsilon_t$ the (guided) prediction of step t and $\sigma$ after the last step
    equal to 0; for Euler steps of a rectified flow the same with $\sigma$ as noise
    level and $(\epsilon - z_0) - v_t$ in the bracket. Exact for *any* network.

    Args:
        scheduler: ``DDIMScheduler`` with ``set_alpha_to_one``, "leading" time steps,
            eps-prediction, and without clipping, thresholding or rescaled betas; or
            ``FlowMatchEulerDiscreteScheduler``, neither stochastic nor inverted. A
            ``steps_offset`` must be smaller than the distance of two time steps.
        options: ``strength``, ``guidance``, ``num_steps`` of :func:`img2img_latents`.

    Returns:
        Residual and displacement $\hat z_0 - z_0$, both (N, C, H, W).

    Raises:
        ValueError: a scheduler for which the identity does not hold.
    """
    _needs_telescope(scheduler)
    steps: list[tuple[Tensor, Tensor]] = []
    out = img2img_latents(
        denoiser,
        scheduler,
        latents,
        cond=cond,
        uncond=uncond,
        noise=noise,
        record=lambda t, x, prediction: steps.append((t, prediction)),
        **options,
    )
    levels, target = _levels(scheduler, [t for t, _ in steps], noise, latents)
    total = torch.zeros_like(latents)
    for k, (_, prediction) in enumerate(steps):
        total += (levels[k] - levels[k + 1]) * (target - prediction)
    return (out - latents) - total, out - latents


def _needs_telescope(scheduler: Any) -> None:
    name = type(scheduler).__name__
    wanted = _TELESCOPES.get(name, {})
    # An option that an older diffusers does not know is off there.
    found = {key: scheduler.config.get(key, value) for key, value in wanted.items()}
    if name in _TELESCOPES and found == wanted:
        return
    odd = {key: value for key, value in found.items() if value != wanted[key]}
    holds = [f"{known}({_arguments(needs)})" for known, needs in _TELESCOPES.items()]
    raise ValueError(
        f"scheduler={name}({_arguments(odd)}): the telescoped form holds for "
        + " and ".join(holds)
    )


def _arguments(options: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in options.items())


def _levels(
    scheduler: Any, timesteps: list[Tensor], noise: Tensor, latents: Tensor
) -> tuple[Tensor, Tensor]:
    """Noise level before each step and after the last; what predictions aim at."""
    if not hasattr(scheduler, "alphas_cumprod"):
        return scheduler.sigmas[-len(timesteps) - 1 :].to(latents), noise - latents
    keep = scheduler.alphas_cumprod[torch.stack(timesteps).cpu()]
    sigma = ((1 - keep) / keep).sqrt()
    return torch.cat([sigma, sigma.new_zeros(1)]).to(latents), noise


def _add_noise(scheduler: Any, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    if hasattr(scheduler, "scale_noise"):
        return scheduler.scale_noise(latents, t, noise)
    return scheduler.add_noise(latents, noise, t)


def _draws_noise(scheduler: Any) -> bool:
    import inspect

    return "generator" in inspect.signature(scheduler.step).parameters


def _join(first: Any, second: Any) -> Any:
    if isinstance(first, Tensor):
        return torch.cat([first, second])
    return tuple(torch.cat(pair) for pair in zip(first, second, strict=True))
