"""Speech in and out: frames, sound, synthesis, tokens, counting and its judge.

Oracles: a direct Fourier sum, closed forms of framing, round trips; no outside files.
"""

import math

import pytest
import torch
from icml25.core import make_generator
from icml25.speechssm.audio import (
    TELEPHONE,
    MelConfig,
    check_audio,
    griffin_lim,
    log_mel,
    mel_filters,
)
from icml25.speechssm.corpus import CountingConfig, DigitSpans, counting_corpus
from icml25.speechssm.espeak import SAMPLE_RATE, Utterance, synthesise
from icml25.speechssm.recogniser import (
    DigitRecogniser,
    RecogniserConfig,
    Transcript,
    coherence,
    coherence_over_time,
    digit_error_rate,
    train_recogniser,
)
from icml25.speechssm.tokens import (
    KMeansTokenizer,
    SpeakerStats,
    TokenizerConfig,
    speaker_stats,
)

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
GRID = MelConfig()
SMALL = CountingConfig(
    voices=("en-us+m3", "en+f4"),
    num_takes=8,
    num_test_takes=2,
    num_clips=8,
    num_long=2,
    long_tokens=512,
)


@pytest.fixture(scope="module")
def corpus():
    return counting_corpus(SMALL, generator=make_generator(0))


@pytest.fixture(scope="module")
def judge(corpus):
    return train_recogniser(
        corpus, RecogniserConfig(num_steps=60), generator=make_generator(1)
    )


def tone(hz: float, seconds: float = 0.5, rate: int = 16_000) -> torch.Tensor:
    return 0.3 * torch.sin(2 * math.pi * hz * torch.arange(int(seconds * rate)) / rate)


# --- frames -------------------------------------------------------------------------


def test_log_mel_equals_a_direct_fourier_sum():
    grid = MelConfig(n_fft=64, win_length=48, hop_length=20, num_mels=6, f_max=4e3)
    audio = torch.randn(200, generator=make_generator(0), dtype=torch.float64)
    mel = log_mel(audio, grid, sample_rate=16_000)
    assert mel.shape == (10, 6)
    window = torch.zeros(64, dtype=torch.float64)
    # stft puts the short window in the middle of the transform
    n = torch.arange(48, dtype=torch.float64)
    window[8:56] = 0.5 - 0.5 * torch.cos(2 * math.pi * n / 48)
    t, k = torch.arange(64.0).double(), torch.arange(33.0).double()
    kernel = torch.exp(-2j * math.pi * k[:, None] * t / 64)
    padded = torch.nn.functional.pad(audio, (32, 32))
    for frame in (0, 3, 9):
        piece = padded[frame * 20 : frame * 20 + 64] * window
        power = (kernel @ piece.to(torch.complex128)).abs().square()
        direct = (mel_filters(grid) @ power).clamp(min=grid.floor).log()
        torch.testing.assert_close(mel[frame], direct, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("hz", [200.0, 1_000.0, 4_000.0])
def test_a_tone_is_loudest_in_its_own_band(hz):
    mel = log_mel(tone(hz), GRID, sample_rate=16_000)
    band = mel[10:-10].mean(0).argmax()
    centres = mel_filters(GRID).argmax(1) * 16_000 / GRID.n_fft
    assert (centres - hz).abs().argmin() == band


def test_neighbouring_filters_sum_to_one_between_centres():
    weight = mel_filters(GRID).sum(0)
    inside = mel_filters(GRID)
    first, last = inside[0].argmax() + 1, inside[-1].argmax() - 1
    torch.testing.assert_close(weight[first:last], torch.ones(last - first).double())


def test_frames_of_a_batch_are_those_of_its_rows():
    audio = torch.randn(2, 3, 4_000, generator=make_generator(0)) * 0.1
    together = log_mel(audio, GRID, sample_rate=16_000)
    assert together.shape == (2, 3, 25, GRID.num_mels)
    alone = log_mel(audio[1, 2], GRID, sample_rate=16_000)
    torch.testing.assert_close(together[1, 2], alone, rtol=0, atol=1e-4)


def test_silence_gives_the_floor_and_nothing_infinite():
    mel = log_mel(torch.zeros(16_000), GRID, sample_rate=16_000)
    torch.testing.assert_close(mel, torch.full_like(mel, math.log(GRID.floor)))
    sound = griffin_lim(mel, GRID, num_steps=4, generator=make_generator(0))
    assert sound.abs().max() < 1e-3


@pytest.mark.parametrize("grid", [GRID, TELEPHONE])
def test_griffin_lim_gives_the_frames_back(grid):
    (speech,) = synthesise([Utterance("seven and four")])
    speech = speech[:: SAMPLE_RATE // grid.sample_rate]
    mel = log_mel(speech, grid, sample_rate=grid.sample_rate)
    sound = griffin_lim(mel, grid, generator=make_generator(0))
    assert len(sound) == len(mel) * grid.hop_length
    again = log_mel(sound, grid, sample_rate=grid.sample_rate)
    error = (again - mel).abs().mean()
    shuffled = (
        again[torch.randperm(len(mel), generator=make_generator(1))] - mel
    ).abs()
    # 0.3 natural units of power where random frames of the same speech differ by 4
    assert error < 0.6 < 0.2 * shuffled.mean() + 0.2
    assert torch.equal(sound, griffin_lim(mel, grid, generator=make_generator(0)))


def test_filters_serve_training_whatever_made_them_first():
    grid = MelConfig(num_mels=7)
    audio = tone(300).requires_grad_()
    with torch.inference_mode(), torch.device("meta"):
        log_mel(audio, grid, sample_rate=16_000)
    log_mel(audio, grid, sample_rate=16_000).sum().backward()
    assert audio.grad.isfinite().all() and audio.grad.any()


def test_phases_are_drawn_where_the_generator_is_whatever_the_default():
    mel = log_mel(tone(300), GRID, sample_rate=16_000)
    expected = griffin_lim(mel, GRID, num_steps=1, generator=make_generator(0))
    with torch.device("meta"):
        sound = griffin_lim(mel, GRID, num_steps=1, generator=make_generator(0))
    assert torch.equal(sound, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_sound_and_tokens_are_drawn_on_the_generators_device(device):
    """Frames and generator may each be on any device."""
    mel = log_mel(tone(300), GRID, sample_rate=16_000)
    config = TokenizerConfig(vocab_size=4)
    for place in DEVICES:
        there, generator = mel.to(device), torch.Generator(place).manual_seed(0)
        sound = griffin_lim(there, GRID, num_steps=1, generator=generator)
        assert sound.device == there.device
        tokenizer = KMeansTokenizer(config).fit([there], generator=generator)
        assert tokenizer.centres.device == there.device
        assert tokenizer.encode(there).device == there.device


@pytest.mark.parametrize(
    ("audio", "rate", "error", "words"),
    [
        (torch.zeros(100), 16_000, ValueError, "at least 160 samples"),
        (torch.zeros(0), 16_000, ValueError, "too short"),
        (torch.zeros(16_000), 8_000, ValueError, "needs 16000 Hz"),
        (torch.full((16_000,), float("nan")), 16_000, ValueError, "NaN"),
        (torch.zeros(16_000, dtype=torch.int16), 16_000, TypeError, "int16"),
    ],
)
def test_bad_audio_is_refused(audio, rate, error, words):
    with pytest.raises(error, match=words):
        log_mel(audio, GRID, sample_rate=rate)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hop_length": 0}, "hop_length"),
        ({"f_max": 9_000.0}, "half the sample rate"),
        ({"num_mels": 0}, "num_mels"),
    ],
)
def test_bad_grids_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        MelConfig(**changes)


def test_too_many_bands_are_refused():
    with pytest.raises(ValueError, match="hold no bin"):
        mel_filters(MelConfig(num_mels=200))


@pytest.mark.parametrize(
    ("mel", "words"),
    [
        (torch.zeros(0, 64), "T >= 1"),
        (torch.zeros(10, 40), "64"),
        (torch.full((10, 64), float("nan")), "NaN"),
        (torch.full((10, 64), 90.0), "mel reaches 90"),
    ],
)
def test_griffin_lim_refuses_bad_frames(mel, words):
    with pytest.raises(ValueError, match=words):
        griffin_lim(mel, GRID)


def test_griffin_lim_refuses_a_momentum_of_one():
    with pytest.raises(ValueError, match="momentum=1"):
        griffin_lim(torch.zeros(5, 64), GRID, momentum=1)


# --- synthesis ----------------------------------------------------------------------


def test_synthesis_depends_on_the_list_alone():
    # the voices f2 and f5 have noise in them
    said = [("one two three", "en+f2"), ("seven", "en-us+f5"), ("seven", "en-us+f5")]
    jobs = [Utterance(*each) for each in said]
    first = synthesise(jobs)
    synthesise([Utterance("something else in between", "en-us+m3")])
    from icml25.speechssm import espeak

    espeak._synthesise.cache_clear()
    second = synthesise(jobs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(0.2 < len(x) / SAMPLE_RATE < 3 and x.abs().max() <= 1 for x in first)


def test_voice_tempo_and_pitch_change_the_sound():
    slow, fast = synthesise(
        [Utterance("seven", rate=100), Utterance("seven", rate=300)]
    )
    assert len(slow) > 1.5 * len(fast)


def test_callers_may_change_what_they_got():
    jobs = [Utterance("nine")]
    first = synthesise(jobs)[0]
    kept = first.clone()
    first.zero_()
    assert torch.equal(synthesise(jobs)[0], kept)


@pytest.mark.parametrize("changes", [{"text": "  "}, {"rate": 10}, {"pitch": 100}])
def test_bad_utterances_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        Utterance(**({"text": "one"} | changes))


def test_an_unknown_voice_and_an_empty_list_are_named():
    with pytest.raises(RuntimeError, match="xx-nowhere"):
        synthesise([Utterance("one", "xx-nowhere")])
    with pytest.raises(ValueError, match="empty"):
        synthesise([])


# --- tokens -------------------------------------------------------------------------


def test_tokens_are_the_nearest_centres():
    mel = torch.randn(400, 64, generator=make_generator(0))
    config = TokenizerConfig(vocab_size=8)
    tokenizer = KMeansTokenizer(config).fit([mel], generator=make_generator(1))
    ids = tokenizer.encode(mel)
    points = tokenizer._stretches(tokenizer.normalise(mel))
    points = (points - tokenizer.mean) @ tokenizer.basis
    assert torch.equal(ids, torch.cdist(points, tokenizer.centres).argmin(1))
    assert ids.shape == (100,) and ids.unique().numel() == 8


def test_half_whitening_leaves_the_square_root_of_the_variance():
    mel = torch.randn(2_000, 64, generator=make_generator(0)) * torch.linspace(3, 1, 64)
    tokenizer = KMeansTokenizer(TokenizerConfig(vocab_size=4, num_components=8))
    tokenizer.fit([mel], generator=make_generator(1))
    points = tokenizer._stretches(tokenizer.normalise(mel))
    whole = (points - points.mean(0)).double()
    variance = torch.linalg.eigvalsh(whole.mT @ whole / len(whole)).flip(0)[:8]
    half = ((points - tokenizer.mean) @ tokenizer.basis).var(0, correction=0)
    torch.testing.assert_close(half.double(), variance.sqrt(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("context", [0, 1, 2])
def test_a_token_sees_its_context_and_no_more(context):
    config = TokenizerConfig(vocab_size=8, context=context)
    tokenizer = KMeansTokenizer(config)
    mel = torch.randn(80, 64, generator=make_generator(0))
    stretches = tokenizer._stretches(mel)
    changed = mel.clone()
    changed[40:44] += 1  # token 10
    moved = (tokenizer._stretches(changed) != stretches).any(1).nonzero().flatten()
    assert moved.tolist() == list(range(10 - context, 11 + context))


def test_a_voice_makes_tokens_pointwise_and_a_window_does_not():
    mel = torch.randn(400, 64, generator=make_generator(0))
    mel[200:] *= 3
    stats = speaker_stats(mel, speech_quantile=0)
    tokenizer = KMeansTokenizer(TokenizerConfig(vocab_size=16))
    tokenizer.fit([mel], [stats], generator=make_generator(1))
    by_voice = torch.cat([tokenizer.encode(m, stats) for m in mel.split(100)])
    assert torch.equal(by_voice, tokenizer.encode(mel, stats))
    by_window = torch.cat([tokenizer.encode(m) for m in mel.split(100)])
    assert not torch.equal(by_window, tokenizer.encode(mel))


def test_level_of_the_recording_does_not_matter():
    mel = torch.randn(400, 64, generator=make_generator(0))
    tokenizer = KMeansTokenizer(TokenizerConfig(vocab_size=16))
    tokenizer.fit([mel], generator=make_generator(1))
    assert torch.equal(tokenizer.encode(mel + 2.5), tokenizer.encode(mel))


def test_statistics_of_a_voice_leave_pauses_out():
    loud, quiet = torch.randn(70, 64, generator=make_generator(0)), torch.zeros(30, 64)
    stats = speaker_stats(torch.cat([quiet - 13, loud]))
    assert stats.mean.abs().max() < 1 and (stats.std - 1).abs().max() < 0.5
    mel = torch.randn(9, 64, generator=make_generator(1))
    torch.testing.assert_close(stats.restore(stats.normalise(mel)), mel)


def test_state_survives_a_round_trip():
    mel = torch.randn(400, 64, generator=make_generator(0))
    config = TokenizerConfig(vocab_size=8, context=1)
    one = KMeansTokenizer(config).fit([mel], generator=make_generator(1))
    two = KMeansTokenizer.from_state(config, one.state_dict())
    assert torch.equal(one.encode(mel), two.encode(mel))
    other = TokenizerConfig(vocab_size=9, context=1)
    with pytest.raises(ValueError, match="another configuration"):
        KMeansTokenizer.from_state(other, one.state_dict())
    with pytest.raises(ValueError, match="basis"):
        KMeansTokenizer.from_state(config, {"mean": one.mean})


def test_tokenizer_refuses_what_it_cannot_read():
    tokenizer = KMeansTokenizer(TokenizerConfig(vocab_size=8))
    mel = torch.randn(400, 64, generator=make_generator(0))
    with pytest.raises(RuntimeError, match="call fit first"):
        tokenizer.encode(mel)
    with pytest.raises(RuntimeError, match="call fit first"):
        tokenizer.state_dict()
    with pytest.raises(ValueError, match="fewer tokens"):
        tokenizer.fit([mel[:16]], generator=make_generator(0))
    with pytest.raises(ValueError, match="at least one recording"):
        tokenizer.fit([], generator=make_generator(0))
    tokenizer.fit([mel], generator=make_generator(0))
    with pytest.raises(ValueError, match="shorter than a token"):
        tokenizer.encode(mel[:3])
    with pytest.raises(ValueError, match="NaN"):
        tokenizer.encode(mel * float("nan"))
    stats = SpeakerStats(torch.zeros(64), torch.ones(64))
    with pytest.raises(IndexError, match="token id 8 is outside"):
        tokenizer.decode(torch.tensor([1, 8]), stats)
    with pytest.raises(IndexError, match="token id -1"):
        tokenizer.decode(torch.tensor([-1]), stats)
    with pytest.raises(TypeError, match="float"):
        tokenizer.decode(torch.tensor([0.5]), stats)


@pytest.mark.parametrize(
    "changes", [{"vocab_size": 1}, {"context": -1}, {"num_components": 49}]
)
def test_bad_tokenizer_sizes_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        TokenizerConfig(**changes)


# --- the counting language ----------------------------------------------------------


def test_recordings_count_upwards(corpus):
    for counters in (corpus.train, corpus.held_out):
        for n in range(len(counters.tokens)):
            digits = counters.digits.row(n)
            assert len(digits) > 5 and coherence(digits) == 1


def test_random_digits_do_not_follow_the_rule(corpus):
    drawn = corpus.sample(64, 512, generator=make_generator(3), counting=False)
    rows = [coherence(drawn.digits.row(n)) for n in range(64)]
    # about 40 digits a row: the mean over 64 rows has a standard error of 0.006
    assert abs(sum(rows) / 64 - 0.1) < 0.03


def test_tokens_of_the_sound_are_the_tokens_of_the_recording(corpus):
    for row in range(2):
        sound = corpus.waveform(corpus.held_out, row)
        assert len(sound) == 512 * 640
        ids = corpus.encode(sound, int(corpus.held_out.speaker[row]))
        same = (ids == corpus.held_out.tokens[row]).float().mean()
        assert same > 0.995  # a token at a border may differ


def test_spans_are_where_the_takes_are(corpus):
    drawn = corpus.sample(3, 300, generator=make_generator(5))
    for n in range(3):
        for value, start, stop, take in zip(
            drawn.digits.value[n].tolist(),
            drawn.digits.start[n].tolist(),
            drawn.digits.stop[n].tolist(),
            drawn.take[n].tolist(),
            strict=True,
        ):
            if value < 0:
                continue
            assert corpus.take_digit[take] == value
            assert corpus.take_speaker[take] == drawn.speaker[n]
            assert torch.equal(drawn.tokens[n, start:stop], corpus.take_tokens[take])


def test_held_out_recordings_use_held_out_takes_only(corpus):
    assert corpus.take_test[corpus.held_out.take].all()
    assert not corpus.take_test[corpus.train.take].any()
    assert corpus.held_out.speaker.tolist() == [0, 1]


def test_same_state_same_corpus_other_state_another():
    again = counting_corpus(SMALL, generator=make_generator(0))
    first = counting_corpus(SMALL, generator=make_generator(0))
    other = counting_corpus(SMALL, generator=make_generator(1))
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, other.tokens)


def test_a_given_tokenizer_is_used_as_it_is(corpus):
    given = KMeansTokenizer.from_state(SMALL.tokenizer, corpus.tokenizer.state_dict())
    again = counting_corpus(SMALL, generator=make_generator(0), tokenizer=given)
    assert again.tokenizer is given
    assert all(map(torch.equal, corpus.take_tokens, again.take_tokens))
    wrong = KMeansTokenizer(TokenizerConfig(vocab_size=8))
    with pytest.raises(ValueError, match="the corpus asks for"):
        counting_corpus(SMALL, generator=make_generator(0), tokenizer=wrong)


def test_sampling_refuses_bad_requests(corpus):
    with pytest.raises(ValueError, match="num=0"):
        corpus.sample(0, 10, generator=make_generator(0))
    with pytest.raises(ValueError, match="numbers of 0..1"):
        corpus.sample(1, 10, generator=make_generator(0), speaker=torch.tensor([2]))


@pytest.mark.parametrize(
    "changes",
    [{"source": "radio"}, {"voices": ()}, {"num_test_takes": 24}, {"max_pause": -1}],
)
def test_bad_corpus_settings_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        CountingConfig(**changes)


@pytest.mark.benchmark_data("fsdd_mini")
def test_recorded_digits_make_the_same_kind_of_corpus():
    config = CountingConfig(source="fsdd", num_clips=4, num_long=2, long_tokens=256)
    recorded = counting_corpus(config, generator=make_generator(0))
    assert len(recorded.take_audio) == 2_000 and recorded.sample_rate == 8_000
    assert int(recorded.take_test.sum()) == 200
    sound = recorded.waveform(recorded.held_out, 0)
    ids = recorded.encode(sound, 0)
    assert (ids == recorded.held_out.tokens[0]).float().mean() > 0.97


# --- the judge ----------------------------------------------------------------------


def test_judge_hears_unseen_takes(corpus, judge):
    drawn = corpus.sample(16, 256, generator=make_generator(7), test=True)
    said = [drawn.digits.row(n) for n in range(16)]
    # A digit cut off at the end may be heard: about one extra in four recordings.
    assert digit_error_rate(judge.transcribe(drawn.tokens), said) < 0.1
    heard = judge.listen(drawn.tokens)
    assert sum(coherence(t.digits) for t in heard) / 16 > 0.9


def test_judge_does_not_invent_counting(corpus, judge):
    drawn = corpus.sample(
        32, 512, generator=make_generator(8), test=True, counting=False
    )
    rows = coherence_over_time(judge.listen(drawn.tokens), num_tokens=512, window=512)
    assert abs(rows[0]["coherence"] - 0.1) < 0.05  # 1,300 pairs: standard error 0.008
    noise = torch.randint(64, (8, 512), generator=make_generator(9))
    heard = [t for t in judge.listen(noise) if len(t.digits) > 5]
    assert all(coherence(t.digits) < 0.5 for t in heard)


def test_judge_hears_the_voice_after_tokens_sound_and_tokens(corpus, judge):
    for row in range(2):
        speaker = int(corpus.held_out.speaker[row])
        ids = corpus.held_out.tokens[row, :250]
        sound = corpus.speak(ids, speaker, generator=make_generator(0))
        assert sound.abs().max() <= 1 and sound.square().mean().sqrt() > 0.01
        again = corpus.encode(sound, speaker)
        assert (again == ids).float().mean() > 0.9  # 0.98 to 1.00 over seeds
        assert (
            digit_error_rate([judge.transcribe(again)], [judge.transcribe(ids)]) < 0.1
        )


def test_judge_looks_at_less_than_two_digits(judge):
    ids = torch.zeros(1, 101, dtype=torch.long)
    other = ids.clone()
    other[0, 50] = 7
    with torch.inference_mode():
        moved = (judge(ids) != judge(other)).any(-1)[0].nonzero().flatten()
    assert moved.min() >= 41 and moved.max() <= 59  # 9 tokens: 0.36 s


def test_judge_refuses_ids_outside_the_vocabulary(judge):
    with pytest.raises(IndexError, match="token id 64"):
        judge.transcribe(torch.tensor([1, 64]))
    with pytest.raises(ValueError, match="empty"):
        judge.transcribe(torch.zeros(0, dtype=torch.long))
    with pytest.raises(ValueError, match="expected"):
        judge.listen(torch.zeros(1, 1, 1, dtype=torch.long))


def test_judge_refuses_short_lessons():
    judge = DigitRecogniser(64, generator=make_generator(0))
    labels = DigitSpans(*(torch.zeros(2, 1, dtype=torch.long) for _ in range(3)))
    ids = torch.zeros(2, 10, dtype=torch.long)
    with pytest.raises(ValueError, match="shorter than a crop"):
        judge.fit(ids, labels, generator=make_generator(0))
    with pytest.raises(ValueError, match="rows"):
        judge.fit(ids[:1], labels, generator=make_generator(0))


def test_a_digit_said_twice_is_heard_twice(corpus, judge):
    takes = corpus._pools(True)[0, 4]
    ids = torch.cat([corpus.take_tokens[takes[0]], corpus.take_tokens[takes[1]]])
    assert judge.transcribe(ids) == [4, 4]


@pytest.mark.parametrize(
    ("heard", "said", "rate"),
    [
        ([[1, 2, 3]], [[1, 2, 3]], 0),
        ([[1, 3]], [[1, 2, 3]], 1 / 3),
        ([[1, 2, 2, 3]], [[1, 2, 3]], 1 / 3),
        ([[3, 2, 1]], [[1, 2, 3]], 2 / 3),
        ([[]], [[1, 2]], 1),
        ([[1], []], [[1], [2]], 1 / 2),
    ],
)
def test_digit_error_rate_counts_edits(heard, said, rate):
    assert digit_error_rate(heard, said) == pytest.approx(rate)


def test_digit_error_rate_needs_something_said():
    with pytest.raises(ValueError, match="must hold a digit"):
        digit_error_rate([[1]], [[]])


def test_coherence_of_known_strings():
    assert coherence([8, 9, 0, 1]) == 1
    assert coherence([1, 1, 2, 2]) == pytest.approx(1 / 3)
    assert math.isnan(coherence([3]))


def test_no_pair_is_lost_between_windows():
    heard = [Transcript([1, 2, 3, 7], [5, 95, 105, 250])]
    rows = coherence_over_time(heard, num_tokens=310, window=100)
    assert [r["pairs"] for r in rows] == [1, 1, 1]  # the rest of 10 tokens is dropped
    assert [r["coherence"] for r in rows] == [1, 1, 0]
    assert rows[0]["digits"] == pytest.approx(2 / 100)
    silent = coherence_over_time([Transcript([], [])], num_tokens=100, window=100)
    assert math.isnan(silent[0]["coherence"])


def test_check_audio_accepts_good_audio():
    assert check_audio(torch.zeros(2, 160), 16_000, expected_rate=16_000) is None
