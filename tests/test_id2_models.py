"""Translation in latents, the six models, what ships, the build, OriPID's protocol."""

from __future__ import annotations

import json
import shutil

import diffusers
import numpy as np
import pytest
import torch
from icml25.core import make_generator
from icml25.id2 import (
    img2img_latents,
    load_features,
    load_generator,
    map_acc,
    rank_of_positive,
    telescoping_residual,
)
from icml25.id2.autoencoders import encode
from icml25.id2.build import BuildConfig, run_build
from icml25.id2.diffusion import diffusion_loss, guided
from icml25.id2.experiments import UNSEEN, fit_closed, search
from icml25.id2.generators import FAMILY, Generator, make_scheduler, make_tokenizer
from icml25.id2.oripid import OriPIDConfig, pair_chunks, read_embeddings, run_oripid
from icml25.id2.packing import (
    MAX_BYTES,
    assets,
    decode_bytes,
    encode_bytes,
    load_kl_vae,
    manifest,
)
from icml25.id2.photos import (
    SHIPPED,
    describe,
    load_caltech,
    load_shipped,
    prompt,
    random_prompts,
    shipped_crops,
    vocabulary,
)
from icml25.id2.ranking import unit
from icml25.id2.selection import choose_lambda, held_out_score

PLAIN_DDIM = {"clip_sample": False, "set_alpha_to_one": True}


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=make_generator(seed), dtype=dtype)


class Wild(torch.nn.Module):
    """A denoiser that answers nonsense, but always the same nonsense."""

    def forward(self, x, t, cond):
        shift = torch.sin(t.to(x) / 100)[:, None, None, None]
        return torch.sin(3 * x) + shift + cond[:, :, None, None].mean(1, keepdim=True)


def _setting(**options):
    z, noise = normal(3, 4, 5, 6, seed=1), normal(3, 4, 5, 6, seed=2)
    cond, uncond = normal(3, 7, seed=3), normal(3, 7, seed=4)
    return (z,), {"cond": cond, "uncond": uncond, "noise": noise, **options}


# --- translation ---------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [1.0, 3.0, 7.5])
@pytest.mark.parametrize("strength", [0.3, 0.8, 1.0])
def test_ddim_telescopes_for_any_network(strength, guidance):
    scheduler = diffusers.DDIMScheduler(**PLAIN_DDIM)
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.double()
    scheduler.final_alpha_cumprod = scheduler.final_alpha_cumprod.double()
    args, options = _setting(strength=strength, guidance=guidance)
    residual, moved = telescoping_residual(Wild(), scheduler, *args, **options)
    # rounding grows with the noise level the path starts at
    assert residual.abs().max() < 1e-10 * max(1, moved.abs().max())
    assert moved.abs().mean() > 0.1


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_euler_on_a_rectified_flow_telescopes_too(shift):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    args, options = _setting()
    residual, moved = telescoping_residual(Wild(), scheduler, *args, **options)
    assert residual.abs().max() < 1e-5 * moved.abs().max()  # sigmas are float32
    assert moved.abs().mean() > 0.1


@pytest.mark.parametrize(
    "scheduler",
    [
        diffusers.DDPMScheduler(),
        diffusers.DPMSolverMultistepScheduler(),
        diffusers.DDIMScheduler(clip_sample=True),
        diffusers.DDIMScheduler(prediction_type="v_prediction", **PLAIN_DDIM),
        diffusers.DDIMScheduler(timestep_spacing="trailing", **PLAIN_DDIM),
        diffusers.DDIMScheduler(timestep_spacing="linspace", **PLAIN_DDIM),
        diffusers.DDIMScheduler(thresholding=True, **PLAIN_DDIM),
        diffusers.DDIMScheduler(rescale_betas_zero_snr=True, **PLAIN_DDIM),
        diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
        diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
    ],
    ids=lambda s: type(s).__name__,
)
def test_other_samplers_are_refused_by_the_identity(scheduler):
    args, options = _setting()
    with pytest.raises(ValueError, match="telescoped form holds for"):
        telescoping_residual(Wild(), scheduler, *args, **options)


def test_a_refused_sampler_hears_which_option_is_wrong():
    scheduler = diffusers.DDIMScheduler(timestep_spacing="trailing", **PLAIN_DDIM)
    args, options = _setting()
    with pytest.raises(ValueError, match=r"r\(timestep_spacing='trailing'\): the"):
        telescoping_residual(Wild(), scheduler, *args, **options)


@pytest.mark.parametrize("code", FAMILY)
def test_a_perfect_denoiser_returns_the_original(code):
    """Told the noise, every sampler of the family ends where it began."""
    config = FAMILY[code]
    scheduler = make_scheduler(config)
    (z,), options = _setting(strength=config.strength, guidance=1.0)
    noise = options["noise"]

    def oracle(x, t, cond):
        if config.objective == "flow":
            return noise - z
        keep = scheduler.alphas_cumprod[t.long()].double()[:, None, None, None]
        if config.objective == "v_prediction":
            return keep.sqrt() * noise - (1 - keep).sqrt() * z
        return noise

    out = img2img_latents(oracle, scheduler, z, **options)
    # DPM-Solver and Euler end at the smallest noise level of the float32 table
    torch.testing.assert_close(out, z, atol=0.05, rtol=0)


def test_loss_vanishes_for_the_exact_prediction():
    zeros = torch.zeros(6, 2, 3, 3)
    for objective in ("epsilon", "v_prediction"):
        scheduler = diffusers.DDIMScheduler(prediction_type=objective)

        def exact(x, t, cond, scheduler=scheduler, objective=objective):
            keep = scheduler.alphas_cumprod[t][:, None, None, None]
            noise = x / (1 - keep).sqrt()  # the clean latents are zero
            return noise if objective == "epsilon" else keep.sqrt() * noise

        loss = diffusion_loss(
            exact, scheduler, zeros, None, generator=make_generator(0)
        )
        assert loss < 1e-9
        assert diffusion_loss(lambda x, t, c: 0 * x, scheduler, zeros, None) > 0.01
    flow = diffusers.FlowMatchEulerDiscreteScheduler()
    loss = diffusion_loss(
        lambda x, t, c: 1000 * x / t[:, None, None, None], flow, zeros, None
    )
    assert loss < 1e-9


def test_guidance_extrapolates_between_the_two_answers():
    (z,), options = _setting()
    cond, uncond, t = options["cond"], options["uncond"], torch.tensor(500)
    one = guided(Wild(), z, t, cond, uncond, 1)
    zero = Wild()(z, t.expand(3), uncond)
    torch.testing.assert_close(
        guided(Wild(), z, t, cond, uncond, 3.0), zero + 3 * (one - zero)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strength": 0.0}, r"strength=0.0: give a number in \(0, 1\]"),
        ({"strength": 1.5}, "strength=1.5"),
        ({"strength": 0.05, "num_steps": 16}, "leaves no step to run"),
        ({"noise": torch.zeros(3, 4, 5, 5)}, "of one shape"),
    ],
)
def test_translation_refuses(change, message):
    args, options = _setting(**change)
    with pytest.raises(ValueError, match=message):
        img2img_latents(Wild(), diffusers.DDIMScheduler(), *args, **options)


# --- the models that ship ------------------------------------------------------------


@pytest.fixture(scope="module")
def model_e():
    return load_generator("E")


def test_batched_translation_equals_the_real_pipeline(model_e):
    pipe = model_e.pipeline()
    crops, _ = shipped_crops(("chelsea",))
    crops = crops[:3]
    words = ["a bright orange photo of a flamingo"] * 3
    # The pipeline draws one noise; draw it again in the same way.
    theirs = pipe(
        words,
        image=crops,
        strength=0.5,
        guidance_scale=3.0,
        num_inference_steps=16,
        generator=make_generator(5),
        output_type="latent",
    ).images
    draw = make_generator(5)
    posterior = model_e.vae.encode(2 * crops - 1).latent_dist
    z = posterior.mean + posterior.std * torch.randn(
        posterior.mean.shape, generator=draw
    )
    ours = img2img_latents(
        model_e.predict,
        make_scheduler(model_e.config, "DDIMScheduler", steps_offset=1),
        z,
        cond=model_e.read(model_e.tokens(words)),
        uncond=model_e.read(model_e.tokens([""] * 3)),
        noise=torch.randn(z.shape, generator=draw),
        strength=0.5,
        guidance=3.0,
    )
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_only_kl_unets_become_the_pipeline():
    with pytest.raises(ValueError, match="model C: the pipeline takes a UNet"):
        load_generator("C").pipeline()


@pytest.mark.parametrize("code", ["C", "E", "F"])
def test_models_translate_and_depend_on_prompt_and_strength(code):
    model = load_generator(code)
    crops, _ = shipped_crops(("flower",))
    crops = crops[:4]
    draws = [
        model.translate(crops, [text] * 4, generator=make_generator(0))
        for text in (prompt("dark", "blue", "ant"), prompt("bright", "red", "ant"))
    ]
    assert draws[0].shape == crops.shape
    assert (draws[0] * 255 - (draws[0] * 255).round()).abs().max() < 1e-4
    assert not torch.equal(draws[0], draws[1])
    weak = model.translate(
        crops, [prompt("dark", "blue", "ant")] * 4, strength=0.1,
        generator=make_generator(0),
    )  # fmt: skip
    assert (weak - crops).abs().mean() < (draws[0] - crops).abs().mean()


def test_translate_refuses_what_does_not_fit(model_e):
    images = torch.rand(2, 3, 32, 32)
    for pictures, prompts, batch in ((images, ["a"], 8), (images, ["a", "b"], 0)):
        with pytest.raises(ValueError, match="give one prompt an image"):
            model_e.translate(pictures, prompts, batch_size=batch)
    with pytest.raises(ValueError, match="0 images"):
        model_e.translate(images[:0], [])
    wrong = Generator(FAMILY["A"], model_e.vae, model_e.words)
    with pytest.raises(
        ValueError, match="A denoises 32 channels, its autoencoder .*16"
    ):
        wrong.translate(images, ["a", "b"])


def test_taef2_models_ask_for_their_autoencoder():
    with pytest.raises(ValueError, match="TAEF2's latents: pass vae="):
        load_generator("A")
    with pytest.raises(ValueError, match="code='Z': one of A, B"):
        load_generator("Z")


@pytest.mark.parametrize("code", FAMILY)
def test_every_checkpoint_fits_its_network(code):
    vae = torch.nn.Identity() if FAMILY[code].latent == "taef2" else None
    model = load_generator(code, vae=vae)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not any(p.requires_grad for p in model.parameters())


def test_own_autoencoder_keeps_the_layout_of_photographs_it_never_saw():
    crops, _ = shipped_crops(("coffee", "china"))
    vae = load_kl_vae()
    with torch.no_grad():
        back = vae.decode(encode(vae, crops)).sample / 2 + 0.5
    # Its colours are poor (the chapter says so); brightness has to be right.
    back, crops = back.mean(1), crops.mean(1)
    flat = (crops - crops.mean((1, 2), keepdim=True)).square().mean()
    assert (back - crops).square().mean() < 0.5 * flat


# --- what ships ----------------------------------------------------------------------


def test_assets_are_small_and_those_of_the_manifest():
    sizes = {p.name: p.stat().st_size for p in assets().iterdir()}
    assert max(sizes.values()) < MAX_BYTES
    assert sum(sizes.values()) < 22e6
    listed = manifest()["files"]
    assert set(sizes) == {*listed, "MANIFEST.json", "README.md"}
    assert {name: sizes[name] for name in listed} == {
        name: entry["bytes"] for name, entry in listed.items()
    }


@pytest.fixture(scope="module")
def features():
    return load_features()


def test_features_fit_together(features):
    assert features.train.shape == (3_500, 512)
    assert features.gallery.shape == (2_351, 512)
    for z, row in (*features.queries.values(), *features.strengths.values()):
        assert len(z) == len(row) and row.max() < 2_351
    assert features.pair_owner.max() < 3_500
    assert set(features.queries) == set(FAMILY) == {"A", *features.other_pairs}


def test_eight_bits_are_off_by_half_a_step_at_most():
    rows = normal(50, 7, dtype=torch.float32)
    mean, step = rows.mean(0), (rows - rows.mean(0)).abs().amax(0) / 127
    error = decode_bytes(encode_bytes(rows, mean, step), mean, step) - rows
    assert (error.abs() <= step / 2 + 1e-6).all()


def test_a_damaged_asset_is_named(tmp_path):
    folder = tmp_path / "assets"
    shutil.copytree(assets(), folder)
    broken = folder / "photos.pt"
    content = bytearray(broken.read_bytes())
    content[len(content) // 2] ^= 1
    broken.write_bytes(content)
    with pytest.raises(ValueError, match=r"photos\.pt is"):
        load_features(folder)
    broken.write_bytes(content[:1000])
    with pytest.raises(ValueError, match=r"photos\.pt is no readable checkpoint"):
        load_features(folder)
    broken.unlink()
    with pytest.raises(FileNotFoundError, match=r"photos\.pt"):
        load_features(folder)


def test_lambda_is_chosen_without_any_unseen_model(features):
    seen = (features.train, features.pair_gen, features.pair_owner)
    lam, scores = choose_lambda(*seen, grid=(0.01, 1.0))
    assert scores[lam] == max(scores.values())
    with pytest.raises(ValueError, match="num_held_out=9000"):
        held_out_score(*seen, lambda *a: unit, num_held_out=9_000)


def test_closed_form_beats_raw_on_seen_and_unseen(features):
    mean = features.train.mean(0)
    w = search(fit_closed(features, 1.0), features)
    raw = search(lambda z: unit(z - mean), features)
    gains = {code: map_acc(w[code])[0] - map_acc(raw[code])[0] for code in FAMILY}
    assert gains["A"] > 0.05
    assert sum(gains[code] for code in UNSEEN) / len(UNSEEN) > 0.03
    assert all(gains[code] > -0.02 for code in "ABD")


def test_without_its_origin_a_gallery_is_refused(features):
    z, row = features.queries["A"]
    with pytest.raises(ValueError, match="outside the gallery"):
        rank_of_positive(z, features.gallery[: int(row.max())], row)


# --- photographs and words -----------------------------------------------------------


def test_shipped_photographs_are_cut_without_overlap():
    crops, origins = shipped_crops(("coffee", "china"), window=64)
    assert crops.shape == (54 + 60, 3, 32, 32)
    photo = load_shipped("coffee")
    first = torch.nn.functional.avg_pool2d(photo[:, :64, :64], 2)
    torch.testing.assert_close(crops[0], first)
    assert origins[0] == "coffee" and origins[-1] == "china"
    assert all(load_shipped(name).shape[0] == 3 for name in SHIPPED)
    with pytest.raises(ValueError, match="name='lena'"):
        load_shipped("lena")
    with pytest.raises(ValueError, match="multiple of size=32"):
        shipped_crops(window=50)


def test_a_window_wider_than_a_photograph_is_refused():
    with pytest.raises(ValueError, match="window=4096: 'chelsea' is 300 x 451"):
        shipped_crops(("chelsea",), window=4096)


def test_captions_say_what_is_there():
    blue = torch.tensor([0.1, 0.3, 0.7])[:, None, None].expand(3, 8, 8)
    white = torch.full((3, 8, 8), 0.97)
    assert describe(torch.stack([blue, white]), ["ant", "cup"]) == [
        "a dark blue photo of a ant",
        "a bright white photo of a cup",
    ]


def test_prompts_come_from_their_generator_and_fit_the_tokenizer():
    classes = ("ant", "sea_horse")
    texts = random_prompts(50, classes, make_generator(0))
    assert texts == random_prompts(50, classes, make_generator(0))
    tokenizer = make_tokenizer(vocabulary(classes))
    ids = tokenizer(texts, padding="max_length", max_length=12, return_tensors="pt")
    assert ids.input_ids.shape == (50, 12)
    assert not (ids.input_ids == 1).any()  # no unknown word
    assert tokenizer("a strange word")["input_ids"].count(1) == 2


# --- the build -----------------------------------------------------------------------

TINY = BuildConfig(
    vae_steps=2,
    vae_batch=4,
    step_share=0.01,
    num_queries=3,
    num_seen=12,
    num_second=3,
    num_pairs=4,
    num_strength=2,
    num_photos=20,
    cnn_steps=2,
)


@pytest.mark.benchmark_data("caltech64")
def test_photos_have_their_split():
    photos = load_caltech(16)
    assert photos.images.shape == (5_851, 3, 16, 16)
    assert int(photos.is_train.sum()) == 3_500
    assert len(photos.classes) == 97 == int(photos.labels.max()) + 1
    assert photos.images.min() >= 0 and photos.images.max() <= 1
    with pytest.raises(ValueError, match="size=20"):
        load_caltech(20)


@pytest.mark.benchmark_data("caltech64", "taef2")
def test_an_interrupted_training_ends_where_an_unbroken_one_does(tmp_path):
    from icml25.id2 import build

    def fit(folder, stop):
        stages = build.Build(
            BuildConfig(folder=str(folder), vae_steps=130, vae_batch=2), "cpu", 0
        )
        module = torch.nn.Linear(3, 1)
        torch.nn.init.ones_(module.weight)
        torch.nn.init.zeros_(module.bias)
        generator = make_generator(0)

        def loss(step):
            if step == stop:
                raise KeyboardInterrupt
            return module(torch.randn(4, 3, generator=generator)).square().mean()

        return stages._fit("toy", module, loss, generator, 130, lr=0.1, ema=0.9)

    whole = fit(tmp_path / "whole", stop=None)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "broken", stop=120)
    again = fit(tmp_path / "broken", stop=None)  # goes on from step 100
    torch.testing.assert_close(again["weight"], whole["weight"], rtol=0, atol=0)
    torch.testing.assert_close(again["curve"], whole["curve"], rtol=0, atol=0)


# --- OriPID --------------------------------------------------------------------------


@pytest.fixture
def oripid_folder(tmp_path):
    """A few origins with two translations each, and two query sets."""
    rng = np.random.default_rng(0)
    shape = np.r_[np.full(4, 0.05), np.full(12, 2.0)]

    def write(folder, name, row):
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / name, row.reshape(4, 2, 2).astype("float32"))

    for i in range(40):
        origin = rng.normal(size=16)
        write(tmp_path / "train", f"T{i}_0.npy", origin)
        for j in (1, 2):
            write(
                tmp_path / "train",
                f"T{i}_{j}.npy",
                origin + shape * rng.normal(size=16),
            )
    for i in range(60):
        origin = rng.normal(size=16)
        write(tmp_path / "gallery", f"{i}.npy", origin)
        if i % 3 == 0:
            for model in ("sd2", "kolors"):
                made = origin + shape * rng.normal(size=16)
                write(tmp_path / "queries" / model, f"{i}.npy", made)
    return tmp_path


def test_oripid_protocol_runs_on_files(oripid_folder):
    config = OriPIDConfig(folder=str(oripid_folder), dim=16, lam=0.01, chunk=7, block=9)
    found = run_oripid(config)
    assert found["num_pairs"] == 80 and found["num_gallery"] == 60
    for model in ("sd2", "kolors"):
        assert found["closed form W"][model][0] > found["raw"][model][0] + 0.2
    json.dumps(found)


def test_oripid_pairs_stand_beside_their_origin(oripid_folder):
    chunks = list(pair_chunks(oripid_folder / "train", dim=16, chunk=7))
    assert [len(origin) for origin, _ in chunks] == [7] * 11 + [3]
    difference = torch.cat([gen - origin for origin, gen in chunks])
    assert difference[:, :4].abs().max() < 0.4 < difference[:, 4:].std()


def test_oripid_refuses_what_does_not_fit(oripid_folder):
    with pytest.raises(FileNotFoundError, match="no folder"):
        run_oripid(OriPIDConfig(folder=str(oripid_folder / "absent"), dim=16))
    with pytest.raises(ValueError, match="16 numbers, dim=15"):
        read_embeddings(oripid_folder / "gallery", dim=15)
    (oripid_folder / "gallery" / "0.npy").unlink()
    with pytest.raises(ValueError, match="1 origins are not in the gallery"):
        run_oripid(OriPIDConfig(folder=str(oripid_folder), dim=16, lam=0.1))
    np.save(oripid_folder / "gallery" / "T1.npy", np.ones(16))
    with pytest.raises(ValueError, match=r"both \(1, 0\)"):
        read_embeddings(oripid_folder / "gallery", dim=16)
    (oripid_folder / "train" / "T3_0.npy").unlink()
    with pytest.raises(ValueError, match="translations and no origin"):
        next(pair_chunks(oripid_folder / "train", dim=16))
    np.save(oripid_folder / "queries" / "sd2" / "7.npy", np.full(16, np.nan))
    with pytest.raises(ValueError, match=r"7\.npy holds NaN"):
        read_embeddings(oripid_folder / "queries" / "sd2", dim=16)


def test_generators_share_their_vocabulary():
    words = manifest()["words"]
    assert len(words) == len(set(words)) == 4 + 3 + 2 + 11 + 97
    model = Generator(FAMILY["C"], torch.nn.Identity(), words)
    assert model.tokens([""]).tolist()[0][:3] == [2, 3, 0]


@pytest.mark.benchmark_data("caltech64", "taef2")
def test_a_tiny_build_goes_from_photos_to_assets(tmp_path):
    from dataclasses import replace

    config = replace(TINY, folder=str(tmp_path))
    metrics = run_build(config)
    json.dumps(metrics)
    assert set(metrics["final_loss"]) == set(FAMILY)
    made = load_features(tmp_path / "assets")
    assert made.pair_gen.shape == (15, 512)
    assert load_generator("E", folder=tmp_path / "assets").config.code == "E"
    stamp = (tmp_path / "generator_A.pt").stat().st_mtime_ns
    run_build(config)  # every stage is there, none runs again
    assert (tmp_path / "generator_A.pt").stat().st_mtime_ns == stamp
    for other in ({"config": replace(config, vae_steps=9)}, {"seed": 1}):
        with pytest.raises(ValueError, match="another configuration or seed"):
            run_build(**{"config": config, **other})
