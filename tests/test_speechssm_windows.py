"""Windows, the prompted decoder, voices, LibriSpeech-Long and measures over time.

Oracles: closed forms of covering, whole against windowed decoding, files written here.
"""

import json
import math

import pytest
import torch
from icml25.core import make_generator
from icml25.speechssm import evaluators, joins, persistence
from icml25.speechssm.decoder import (
    DecoderConfig,
    PromptedMelDecoder,
    prompt_vector,
    train_decoder,
)
from icml25.speechssm.evaluators import EvaluatorMissing, load_evaluators
from icml25.speechssm.longform import (
    LongFormConfig,
    group_segments,
    librispeech_long,
    measure_over_time,
    run_longform,
)
from icml25.speechssm.recordings import (
    ReadingConfig,
    librispeech_mini,
    read_aloud,
)
from icml25.speechssm.tokens import KMeansTokenizer, TokenizerConfig, speaker_stats
from icml25.speechssm.voices import SpeakerSpace, similarity_over_time
from icml25.speechssm.windows import (
    decode_long,
    join_distance,
    split_windows,
    stitch,
    tokenize_long,
    window_bounds,
)

TINY = DecoderConfig(embed_dim=8, width=12, prompt_frames=20, crop=16, num_steps=5)
READING = ReadingConfig(num_train=24, clip_s=11.0, num_long=3, long_s=25.0)


@pytest.fixture(scope="module")
def task():
    return joins.prepare_reading(
        "espeak",
        READING,
        TokenizerConfig(vocab_size=100, context=1, num_cepstra=18),
        generator=make_generator(0),
    )


# --- windows ------------------------------------------------------------------------

SIZES = [(8, 0), (8, 1), (8, 3), (8, 4), (8, 7), (5, 2), (1, 0)]


@pytest.mark.parametrize(("window", "overlap"), SIZES)
@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 12, 13, 40, 41])
def test_kept_parts_cover_the_recording_once(length, window, overlap):
    bounds = window_bounds(length, window=window, overlap=overlap)
    covered = [t for w in bounds for t in range(w.keep_from, w.keep_to)]
    assert covered == list(range(length))
    if length <= window:
        assert len(bounds) == 1
    else:
        assert len(bounds) == math.ceil((length - overlap) / (window - overlap))
    for w, after in zip(bounds, bounds[1:], strict=False):
        assert after.start - w.start == window - overlap
        # context on either side of the cut, the odd token to the left window
        assert after.keep_from - after.start == (overlap + 1) // 2
        assert w.stop - w.keep_to == overlap // 2
    assert all(w.start <= w.keep_from < w.keep_to <= w.stop for w in bounds)


def test_the_papers_sizes():
    bounds = window_bounds(6_000, window=750, overlap=100)  # 4 minutes
    assert len(bounds) == 10 and bounds[1] == (650, 1400, 700, 1350)


@pytest.mark.parametrize(
    ("length", "window", "overlap", "words"),
    [
        (0, 8, 2, "empty"),
        (10, 8, 8, "0 <= overlap < window"),
        (10, 8, 9, "overlap=9"),
        (10, 8, -1, "overlap=-1"),
        (10, 0, 0, "window=0"),
    ],
)
def test_bad_windows_are_refused(length, window, overlap, words):
    with pytest.raises(ValueError, match=words):
        window_bounds(length, window=window, overlap=overlap)


@pytest.mark.parametrize("tail", ["repeat", "silence", "none"])
@pytest.mark.parametrize(("window", "overlap"), SIZES)
def test_splitting_and_stitching_is_the_identity(window, overlap, tail):
    x = torch.arange(82.0).view(41, 2)
    bounds = window_bounds(41, window=window, overlap=overlap)
    assert torch.equal(stitch(split_windows(x, bounds, tail=tail), bounds), x)


def test_tails_hold_what_they_say():
    x = torch.tensor([1.0, 2, 3])
    bounds = window_bounds(3, window=8, overlap=0)
    assert split_windows(x, bounds, tail="repeat").tolist() == [
        [1, 2, 3, 1, 2, 3, 1, 2]
    ]
    silent = split_windows(x, bounds, tail="silence", silence=-9.0)
    assert silent.tolist() == [[1, 2, 3, -9, -9, -9, -9, -9]]
    assert x.tolist() == [1, 2, 3]
    assert split_windows(x, bounds, tail="none")[0].tolist() == [1, 2, 3]


def test_units_of_several_frames():
    frames = torch.arange(36.0)
    bounds = window_bounds(9, window=4, overlap=1)
    pieces = split_windows(frames, bounds, tail="repeat", unit=4)
    assert pieces.shape == (3, 16)
    assert torch.equal(stitch(pieces, bounds, unit=4), frames)


def test_windows_refuse_bad_pieces():
    bounds = window_bounds(10, window=8, overlap=2)
    with pytest.raises(ValueError, match="tail='loop'"):
        split_windows(torch.zeros(10), bounds, tail="loop")
    with pytest.raises(ValueError, match="nothing to repeat"):
        split_windows(torch.zeros(0), bounds)
    with pytest.raises(ValueError, match="1 pieces for 2 windows"):
        stitch([torch.zeros(8)], bounds)
    with pytest.raises(ValueError, match="too short"):
        stitch([torch.zeros(3), torch.zeros(8)], bounds)


def test_distance_to_a_join():
    bounds = window_bounds(12, window=8, overlap=4)
    assert [w.keep_from for w in bounds] == [0, 6]
    assert join_distance(bounds).tolist() == [6, 5, 4, 3, 2, 1, 1, 2, 3, 4, 5, 6]
    assert join_distance(window_bounds(3, window=8, overlap=0)).tolist() == [4, 4, 4]


def test_a_pointwise_tokenizer_does_not_see_windows():
    mel = torch.randn(1_003, 64, generator=make_generator(0))
    stats = speaker_stats(mel)
    tokenizer = KMeansTokenizer(TokenizerConfig(vocab_size=16))
    tokenizer.fit([mel], [stats], generator=make_generator(1))
    whole = tokenizer.encode(mel, stats)
    for tail in ("repeat", "silence", "none"):
        ids = tokenize_long(
            mel, tokenizer, window=64, overlap=8, tail=tail, stats=stats
        )
        assert torch.equal(ids, whole)


@pytest.mark.parametrize("context", [1, 2, 3])
def test_tokens_with_context_are_exact_from_an_overlap_of_twice_the_context(context):
    mel = torch.randn(2_000, 64, generator=make_generator(0))
    stats = speaker_stats(mel)
    tokenizer = KMeansTokenizer(TokenizerConfig(vocab_size=64, context=context))
    tokenizer.fit([mel], [stats], generator=make_generator(1))
    whole = tokenizer.encode(mel, stats)

    def windowed(overlap):
        return tokenize_long(
            mel, tokenizer, window=40, overlap=overlap, tail="none", stats=stats
        )

    assert torch.equal(windowed(2 * context), whole)
    assert not torch.equal(windowed(0), whole)


def test_one_window_without_a_tail_is_the_whole():
    mel = torch.randn(100, 64, generator=make_generator(0))
    tokenizer = KMeansTokenizer(TokenizerConfig(vocab_size=8, context=1))
    tokenizer.fit([mel], generator=make_generator(1))
    ids = tokenize_long(mel, tokenizer, window=300, overlap=20, tail="none")
    assert torch.equal(ids, tokenizer.encode(mel))


def test_tokenizing_refuses_less_than_a_token():
    mel = torch.randn(100, 64, generator=make_generator(0))
    tokenizer = KMeansTokenizer(TokenizerConfig(vocab_size=8))
    tokenizer.fit([mel], generator=make_generator(1))
    with pytest.raises(ValueError, match="T >= 4"):
        tokenize_long(mel[:3], tokenizer, window=10, overlap=2)
    with pytest.raises(ValueError, match="overlap=10"):
        tokenize_long(mel, tokenizer, window=10, overlap=10)


# --- the decoder --------------------------------------------------------------------


def decoder(dtype=torch.float64, **changes):
    config = DecoderConfig(embed_dim=8, width=12, **changes)
    made = PromptedMelDecoder(20, 5, config, generator=make_generator(0)).to(dtype)
    generator = make_generator(1)
    with torch.no_grad():  # prompts act, as after training
        for name, parameter in made.named_parameters():
            if name.startswith(("film", "voice", "level")):
                fresh = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.3 * fresh)
    return made.eval()


@torch.inference_mode()
@pytest.mark.parametrize(("kernel", "layers"), [(5, 3), (3, 2), (7, 1)])
def test_decoding_is_exact_from_an_overlap_of_twice_the_radius(kernel, layers):
    model = decoder(kernel=kernel, num_layers=layers)
    assert model.radius == layers * (kernel // 2)
    ids = torch.randint(20, (157,), generator=make_generator(2))
    prompt = torch.randn(10, generator=make_generator(3), dtype=torch.float64)
    whole = model(ids[None], prompt)[0]

    def windowed(overlap):
        return decode_long(
            ids, lambda x: model(x, prompt), vocab_size=20, window=40, overlap=overlap
        )

    for overlap in (2 * model.radius, 2 * model.radius + 1, 30):
        torch.testing.assert_close(windowed(overlap), whole, rtol=0, atol=1e-12)
    assert (windowed(0) - whole).abs().max() > 1e-3
    # one token short of 2 R on one side is enough to break it
    assert (windowed(2 * model.radius - 2) - whole).abs().max() > 1e-9


@torch.inference_mode()
def test_radius_is_exactly_what_a_frame_sees():
    model = decoder()
    ids = torch.zeros(1, 41, dtype=torch.long)
    other = ids.clone()
    other[0, 20] = 3
    moved = (model(ids) != model(other)).any(-1)[0].view(41, 4).any(1)
    assert moved.nonzero().flatten().tolist() == list(range(14, 27))


@torch.inference_mode()
def test_prompt_steers_the_voice_and_only_with_a_prompted_network():
    ids = torch.randint(20, (2, 30), generator=make_generator(2))
    prompts = torch.randn(2, 10, generator=make_generator(3), dtype=torch.float64)
    model = decoder()
    spoken = model(ids, prompts)
    assert not torch.allclose(spoken[0], model(ids, prompts.flip(0))[0])
    torch.testing.assert_close(spoken[1], model(ids[1:], prompts[1])[0])
    deaf = decoder(use_prompt=False)
    assert torch.equal(deaf(ids, prompts), deaf(ids))


def test_training_lowers_the_error_and_learns_the_voice():
    """Two voices that differ in level: only a prompt can tell which is meant."""
    generator = make_generator(0)
    ids = [torch.randint(20, (60,), generator=generator) for _ in range(12)]
    table = torch.randn(20, 4, 6, generator=generator)
    mels = [
        table[row].flatten(0, 1) + (3.0 if n % 2 else -3.0) for n, row in enumerate(ids)
    ]
    config = DecoderConfig(
        embed_dim=16, width=32, prompt_frames=50, crop=40, num_steps=150
    )
    error = {}
    for use_prompt in (True, False):
        fresh = DecoderConfig(**{**vars(config), "use_prompt": use_prompt})
        model = train_decoder(ids, mels, fresh, vocab_size=20, generator=generator)
        row = torch.randint(20, (60,), generator=make_generator(9))  # an unseen text
        error[use_prompt] = 0.0
        for level in (3.0, -3.0):
            mel = table[row].flatten(0, 1) + level
            error[use_prompt] += model.error(row, mel, prompt_vector(mel[:50])) / 2
    # levels are 6 apart and the deviation is 3.2: without a prompt the best is near 0.9
    assert error[True] < 0.3 and error[False] > 0.6


@torch.inference_mode()
def test_no_prompt_drives_the_frames_out_of_bounds():
    model = decoder()
    ids = torch.randint(20, (1, 30), generator=make_generator(2))
    frames = model(ids, torch.full((10,), 1e4, dtype=torch.float64))
    assert frames.abs().max() <= 6  # deviations; this decoder's are 1 around 0


@torch.inference_mode()
def test_a_stranger_is_no_further_out_than_the_voices_of_training():
    """The network itself is bounded, not only its clamped output.

    With unbounded prompts and scales the three layers multiplied each other's gains:
    on recorded readers the error with a prompt was twenty times that without.
    """
    model = decoder()
    ids = torch.randint(20, (30,), generator=make_generator(2))
    voice = torch.randn(10, generator=make_generator(3), dtype=torch.float64)
    silent = torch.zeros(120, 5, dtype=torch.float64)
    near, far, further = (model.error(ids, silent, s * voice) for s in (3, 1e2, 1e4))
    assert further == pytest.approx(far, rel=0.02)
    assert far < 3 * near


def test_decoder_refuses_what_it_cannot_say():
    model = decoder(torch.float32)
    with pytest.raises(IndexError, match="token id 20"):
        model(torch.tensor([[20]]))
    with pytest.raises(IndexError, match="token id 99"):
        decode_long(torch.tensor([99]), model, vocab_size=20, window=8, overlap=2)
    with pytest.raises(ValueError, match="expected"):
        model(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="empty"):
        model(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="prompt of shape"):
        model(torch.tensor([[1]]), torch.zeros(4))
    with pytest.raises(ValueError, match="NaN"):
        model(torch.tensor([[1]]), torch.full((10,), float("nan")))
    with pytest.raises(ValueError, match="the prompt is empty"):
        prompt_vector(torch.zeros(0, 5))
    with pytest.raises(ValueError, match="kernel=4"):
        PromptedMelDecoder(9, 5, DecoderConfig(kernel=4), generator=make_generator(0))


def test_decoder_training_refuses_bad_lessons():
    model = PromptedMelDecoder(20, 5, TINY, generator=make_generator(0))
    ids, mel = [torch.zeros(20, dtype=torch.long)], [torch.randn(80, 5)]
    fit = {"generator": make_generator(0)}
    with pytest.raises(ValueError, match="as many of each"):
        model.fit(ids, mel, [], **fit)
    with pytest.raises(ValueError, match="as long as a crop"):
        model.fit([ids[0][:3]], mel, mel, **fit)
    with pytest.raises(ValueError, match="prompt is shorter"):
        model.fit(ids, mel, [mel[0][:5]], **fit)


# --- readings and voices ------------------------------------------------------------


def test_readings_are_whole_and_their_voices_unseen(task):
    assert len(task.train) == 24 and len(task.long) == 3
    for reading in task.train + task.long:
        assert sum(reading.segments) == len(reading.audio)
        assert torch.isfinite(reading.audio).all() and reading.text
    assert min(r.duration_s for r in task.train) >= 11
    assert min(r.duration_s for r in task.long) >= 25
    variants = [{r.speaker.split("+")[1] for r in p} for p in (task.train, task.long)]
    names = [{v.split("/")[0] for v in group} for group in variants]
    assert not names[0] & names[1]


def test_readings_repeat_with_the_generator():
    config = ReadingConfig(num_train=1, clip_s=5.0, num_long=1, long_s=5.0)
    one, two = (read_aloud(config, generator=make_generator(4)) for _ in range(2))
    assert torch.equal(one[0][0].audio, two[0][0].audio)
    assert one[1][0].text == two[1][0].text


@pytest.mark.benchmark_data("librispeech_mini")
def test_recorded_readings_are_cut_as_their_manifest_says():
    train, long = librispeech_mini(num_train_files=1)
    assert len({r.speaker for r in train}) == len(train)
    assert len(long) == 11 and all(len(r.segments) >= 10 for r in long)
    assert all(65 <= r.duration_s <= 223 for r in long)


def test_speaker_space_tells_unseen_voices_apart(task):
    space = SpeakerSpace([m for m in task.train_mels if len(m) >= 400])
    halves = [(m[:1_000], m[1_000:2_000]) for m in task.long_mels]
    table = torch.tensor(
        [[float(space(a) @ space(b)) for _, b in halves] for a, _ in halves]
    )
    assert table.argmax(1).tolist() == [0, 1, 2]
    torch.testing.assert_close(
        space(task.long_mels[0]).norm(), torch.tensor(1.0).double()
    )


def test_speaker_space_ignores_nothing_else_but_needs_voices():
    with pytest.raises(ValueError, match="two voices"):
        SpeakerSpace([torch.zeros(1_000, 4)])
    with pytest.raises(ValueError, match="400 frames"):
        SpeakerSpace([torch.zeros(300, 4)] * 3)


def test_similarity_over_time_of_known_vectors():
    signal = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1], [5, 5]])
    curve = similarity_over_time(
        signal, torch.tensor([1.0, 0]), lambda x: x.mean(0), window=2
    )
    assert curve == [1, 0]
    with pytest.raises(ValueError, match="shorter than the window"):
        similarity_over_time(signal, signal[0], lambda x: x.mean(0), window=6)


# --- the probes ---------------------------------------------------------------------


def test_overlap_mends_the_joins(task):
    rows = joins.measure_joins(task, [(128, 0), (128, 32)])
    bare, mended = rows
    # 0.37 to 0.42 against 0.88 to 0.93 with 200 centres and 8 readings
    assert mended["at_join"] - bare["at_join"] > 0.2
    assert abs(mended["at_join"] - mended["overall"]) < 0.15


def test_silent_tail_tells_the_end_and_repeated_tail_does_not(task):
    result = joins.probe_end(
        task, window=200, real=(60, 160), num_folds=4, generator=make_generator(0)
    )
    # with 24 clips the standard error is 0.08; how readings end is in the control too
    assert result["silence"] > 0.95 and result["repeat"] < 0.8
    assert abs(result["repeat"] - result["control"]) < 0.15
    with pytest.raises(ValueError, match="the probe needs 8"):
        joins.probe_end(task, window=900, real=(60, 160), generator=make_generator(0))


def test_shipped_decoders_keep_unseen_voices():
    task, prompted, plain, space = persistence.shipped_voices(
        ReadingConfig(num_train=0, num_long=3, long_s=25.0)
    )
    config = persistence.VoiceConfig(span_s=5.0)
    result = persistence.measure_voices(
        task, prompted, plain, config, space=space, generator=make_generator(0)
    )
    own, none = (torch.tensor(result["similarity"][k]) for k in ("own", "none"))
    assert own.max() - own.min() < 0.06  # the voice does not drift
    assert own.mean() > none.mean() + 0.2 and own.mean() > result["others"]["own"] + 0.3
    assert torch.tensor(result["swap"]).argmax(1).tolist() == [0, 1, 2]
    assert result["error"]["with_prompt"] < result["error"]["without_prompt"]


def test_a_speaker_space_survives_a_round_trip(task):
    space = SpeakerSpace(task.train_mels)
    again = SpeakerSpace.from_state(space.state_dict())
    mel = task.long_mels[0]
    torch.testing.assert_close(again(mel), space(mel), rtol=0, atol=1e-4)


def test_unknown_source_is_refused():
    with pytest.raises(ValueError, match="source='radio'"):
        joins.run_windows(joins.WindowConfig(source="radio"))


# --- LibriSpeech-Long ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("durations", "stretches"),
    [
        ([], []),
        ([5], [(0, 1)]),
        ([5, 5], [(0, 2)]),
        ([5, 5, 1], [(0, 2), (2, 3)]),
        ([12, 3], [(0, 1), (1, 2)]),  # too long by itself
        ([3, 12, 3, 3], [(0, 1), (1, 2), (2, 4)]),
        ([10, 10], [(0, 1), (1, 2)]),  # exactly the target fits
    ],
)
def test_segments_are_joined_greedily(durations, stretches):
    assert group_segments(durations, target=10) == stretches


def test_stretches_are_maximal_and_cover_everything():
    for seed in range(5):
        draw = torch.rand(50, generator=make_generator(seed)) * 30 + 1
        durations = draw.tolist()
        stretches = group_segments(durations, target=60.0)
        assert [n for a, b in stretches for n in range(a, b)] == list(range(50))
        for (a, b), after in zip(stretches, stretches[1:], strict=False):
            assert sum(durations[a:b]) <= 60
            assert sum(durations[a:b]) + durations[after[0]] > 60


@pytest.mark.parametrize(("durations", "target"), [([1, 0], 5), ([1], 0), ([-1], 5)])
def test_bad_durations_are_refused(durations, target):
    with pytest.raises(ValueError, match="must be positive"):
        group_segments(durations, target=target)


@pytest.fixture
def librispeech(tmp_path):
    """A LibriSpeech of two speakers, three chapters, half-second utterances."""
    import soundfile

    for speaker, chapter, count in (("19", "198", 5), ("19", "227", 1), ("7", "1", 2)):
        folder = tmp_path / "test-clean" / speaker / chapter
        folder.mkdir(parents=True)
        lines = []
        for n in range(count):
            name = f"{speaker}-{chapter}-{n:04}"
            samples = torch.full((8_000,), 0.01 * (n + 1)).numpy()
            soundfile.write(folder / f"{name}.flac", samples, 16_000)
            lines.append(f"{name} WORDS OF {n}")
        text = "\n".join(lines)
        (folder / f"{speaker}-{chapter}.trans.txt").write_text(text, encoding="utf-8")
    return tmp_path


def test_librispeech_long_is_made_of_its_segments(librispeech):
    items = librispeech_long(librispeech, "test-clean", target_s=1.0)
    assert [i.name for i in items] == [
        "19_198_198_0000",
        "19_198_198_0001",
        "19_198_198_0002",
        "19_227_227_0000",
        "7_1_1_0000",
    ]
    assert [i.duration_s for i in items] == [1, 1, 0.5, 0.5, 1]
    assert items[1].text == "WORDS OF 2 WORDS OF 3"
    audio, rate = items[1].audio()
    assert rate == 16_000 and audio.shape == (16_000,)
    torch.testing.assert_close(
        audio[[0, -1]], torch.tensor([0.03, 0.04]), rtol=0, atol=1e-4
    )


def test_a_missing_split_is_named(librispeech):
    with pytest.raises(FileNotFoundError, match="dev-other"):
        librispeech_long(librispeech, "dev-other")


# --- measures over time -------------------------------------------------------------


def fake_judges():
    return {
        "voice": lambda x: torch.stack([x.mean(), x.std()]),
        "naturalness": lambda x: float(x.mean()),
        "transcribe": lambda x: "" if x.abs().max() == 0 else "a b c",
        "meaning": lambda texts: torch.eye(len(texts))[:, :2],
        "perplexity": lambda text: float(len(text)),
    }


def test_measures_are_taken_of_each_window():
    prompt = torch.ones(16_000)
    later = torch.cat([torch.full((16_000,), 2.0), torch.zeros(20_000)])
    rows = measure_over_time(
        later, prompt, sample_rate=16_000, judges=fake_judges(), window_s=1.0
    )
    assert [r["start_s"] for r in rows] == [0, 1]  # a quarter of a window is dropped
    assert rows[0]["speaker_similarity"] == pytest.approx(1)
    assert [r["naturalness"] for r in rows] == [2, 0]
    assert rows[0]["words_per_s"] == 3 and rows[0]["perplexity"] == 5
    assert rows[0]["coherence"] == 0 and math.isnan(rows[1]["coherence"])
    assert rows[1]["words_per_s"] == 0 and math.isnan(rows[1]["perplexity"])


def test_without_judges_nothing_is_measured():
    audio = torch.ones(32_000)
    rows = measure_over_time(audio, audio, sample_rate=16_000, judges={}, window_s=1.0)
    assert rows == [{"start_s": 0}, {"start_s": 1}]


def test_measures_refuse_bad_audio():
    good = torch.ones(32_000)
    for audio, rate, words in (
        (good[:100], 16_000, "too short"),
        (good * float("nan"), 16_000, "NaN"),
        (good, 8_000, "needs 16000 Hz"),
    ):
        with pytest.raises(ValueError, match=words):
            measure_over_time(audio, good, sample_rate=rate, judges={}, window_s=1.0)


def test_missing_judges_are_skipped_with_a_message(monkeypatch):
    monkeypatch.setattr(evaluators.importlib.util, "find_spec", lambda name: None)
    found, skipped = load_evaluators()
    assert found == {} and len(skipped) == 5
    assert all("pip install" in message for message in skipped)
    with pytest.raises(EvaluatorMissing, match="pocketsphinx"):
        evaluators.Transcriber()


def test_unknown_judges_are_refused():
    with pytest.raises(ValueError, match="taste"):
        load_evaluators(["taste"])


@pytest.mark.parametrize("name", ["voice", "naturalness", "transcribe"])
def test_judges_of_sound_read_real_speech(name, task):
    found, skipped = load_evaluators([name])
    if skipped:
        pytest.skip(skipped[0])
    judge, speech = found[name], task.long[0].audio[: 10 * 16_000]
    if name == "voice":
        other = judge(task.long[2].audio[: 10 * 16_000])
        same = judge(task.long[0].audio[10 * 16_000 : 20 * 16_000])
        assert judge(speech) @ same > judge(speech) @ other
    elif name == "naturalness":
        noise = 0.08 * torch.randn(len(speech), generator=make_generator(0))
        assert 1 <= judge(noise) < judge(speech) <= 5
    else:
        assert len(judge(speech).split()) > 5
    with pytest.raises(ValueError, match="samples"):
        judge(speech[:10])


def test_the_suite_tells_the_true_voice_from_another():
    config = LongFormConfig(
        reading=ReadingConfig(num_train=24, clip_s=11.0, num_long=2, long_s=30.0),
        voice=persistence.VoiceConfig(
            tokenizer=TokenizerConfig(vocab_size=64, num_cepstra=18),
            decoder=DecoderConfig(num_steps=20, crop=40),
            num_steps_gl=4,
        ),
        target_s=30.0,
        window_s=8.0,
        num_items=2,
    )
    result = run_longform(config, seed=0)
    json.dumps(result)  # plain numbers only
    scores = {k: v["speaker_similarity"] for k, v in result["scores"].items()}
    assert set(scores) == {"true", "resynthesis", "other", "loop"}
    assert min(scores["true"]) > max(scores["other"]) + 0.3
    assert result["skipped"] == []
    with pytest.raises(ValueError, match="num_items=1"):
        LongFormConfig(num_items=1)
