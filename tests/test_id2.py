"""Origin identification: retrieval, the linear map, CosFace, autoencoders, theory.

Golden values (tests/golden/id2/README.md) are numbers that the authors' released margin
head, evaluation and schedule give, TAEF2's own latents, and features made elsewhere.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from icml25.core import data, make_generator
from icml25.id2 import (
    TAEF2,
    CosFaceHead,
    LinearIdentifier,
    PairScatter,
    embed,
    lda_transform,
    load_taef2,
    map_acc,
    rank_of_positive,
    topk,
    train_cosface,
    transfer_constant,
    whitening_transform,
)
from icml25.id2.attacks import ATTACKS, blur, crop, jpeg
from icml25.id2.autoencoders import BlockPCA, decode, encode, load_tensors
from icml25.id2.margin import CosFaceConfig, make_network, paper_lr
from icml25.id2.ranking import (
    _full_precision,
    locate_origins,
    ranks_from_scores,
    standard_error,
    unit,
)
from icml25.id2.theory import exact_annihilator, singular_value_cosine

GOLDEN = Path(__file__).parent / "golden" / "id2"
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=make_generator(seed), dtype=torch.float64).to(
        dtype
    )


def spd(dim, seed, count=None):
    rows = normal(count or 3 * dim, dim, seed=seed, dtype=torch.float64)
    rows = rows * torch.linspace(0.3, 2, dim, dtype=torch.float64)
    return rows.mT @ rows / len(rows)


# --- ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", [1, 7, 64, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiled_ranks_equal_the_dense_ones(block, dtype, device):
    q, g = unit(normal(40, 16, seed=1)), unit(normal(100, 16, seed=2))
    positive = torch.randint(100, (40,), generator=make_generator(3))
    positive[0] = 99  # in the last, shorter tile
    dense = ranks_from_scores(q.double() @ g.double().mT, positive)
    tiled = rank_of_positive(
        q.to(device, dtype), g.to(device, dtype), positive.to(device), block=block
    )
    assert torch.equal(tiled.cpu(), dense)


@pytest.mark.parametrize("block", [3, 8, 50])
def test_copies_of_the_positive_are_ties_in_whatever_tile(block):
    g = unit(normal(50, 32, seed=4))
    g[[5, 20, 49]] = g[11].clone()
    q = unit(g[11:12] + 0.01 * normal(1, 32, seed=5))
    ranks = rank_of_positive(q, g, torch.tensor([11]), block=block)
    assert ranks.item() == 2.5  # ranks 1 to 4 shared by four rows
    assert map_acc(ranks) == (0.4, 0.0)


def test_a_query_equal_to_its_origin_is_first():
    g = unit(normal(3_000, 64, seed=6))
    ranks = rank_of_positive(g, g, torch.arange(3_000), block=777)
    assert map_acc(ranks) == (1.0, 1.0)


def test_rows_closer_than_rounding_are_still_told_apart():
    # Both scores round to the same float32; in float64 the stored rows differ.
    g = torch.tensor([[1.0, 1e-4, 0.0], [1.0, 0.0, 1.1e-4]])
    q = torch.tensor([[1.0, 1e-4, 1e-4]])
    for positive, expected in ((0, 2.0), (1, 1.0)):
        assert rank_of_positive(q, g, torch.tensor([positive])).item() == expected


def test_all_equal_scores_share_the_middle_rank():
    ranks = rank_of_positive(torch.ones(2, 3), torch.ones(9, 3), torch.tensor([0, 8]))
    assert ranks.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_gallery_barely_moves_accuracy(dtype):
    g = unit(normal(5_000, 64, seed=7))
    positive = torch.arange(0, 5_000, 5)
    q = unit(g[positive] + 0.22 * normal(1_000, 64, seed=8))
    full = map_acc(rank_of_positive(q, g, positive))
    half = map_acc(rank_of_positive(q, g.to(dtype), positive, block=512))
    assert 0.5 < full[1] < 0.99  # neither trivial nor hopeless
    assert abs(full[1] - half[1]) <= 0.005
    exact = ranks_from_scores(q.double() @ g.to(dtype).double().mT, positive)
    assert torch.equal(rank_of_positive(q, g.to(dtype), positive, block=512), exact)


def test_topk_equals_sorting():
    q, g = unit(normal(20, 8, seed=9)), unit(normal(90, 8, seed=10))
    value, index = topk(q, g, 12, block=7)
    expected, place = (q @ g.mT).topk(12)
    torch.testing.assert_close(value, expected)
    assert torch.equal(index, place)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_no_rank_and_no_score(dtype, device):
    g = unit(normal(2_000, 64, seed=7)).to(device)
    positive = torch.arange(200, device=device)
    q = unit(g[positive] + 0.22 * normal(200, 64, seed=8).to(device))
    ranks, (value, index) = rank_of_positive(q, g, positive), topk(q, g, 3)
    with torch.autocast(device, dtype):
        assert (q @ g.mT).dtype == dtype  # it is on
        assert torch.equal(rank_of_positive(q, g, positive, block=512), ranks)
        scores, place = topk(queries=q, gallery=g, k=3)
    assert torch.equal(scores, value) and torch.equal(place, index)


class _Precision(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the switch's place at each matrix product."""

    def __init__(self, switch):
        super().__init__()
        self.switch, self.seen = switch, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mm.default:
            self.seen.append(self.switch.fp32_precision)
        return function(*args, **(kwargs or {}))


needs_switch = pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch < 2.9"
)


@needs_switch
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["switch", "level"])
def test_ranks_are_computed_in_full_precision_whatever_the_switch(way, device):
    switches = {
        "cuda": torch.backends.cuda.matmul,
        "cpu": torch.backends.mkldnn.matmul,
    }
    switch = switches[device]
    g = unit(normal(300, 64)).to(device)
    place = torch.arange(9, device=device)
    q = unit(g[place] + 0.22 * normal(9, 64, seed=8).to(device))
    ranks, best = rank_of_positive(q, g, place), topk(q, g, 2)[0]
    before = {each: each.fp32_precision for each in switches.values()}
    try:
        if way == "switch":
            switch.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision("high")
        with _Precision(switch) as watch:
            assert torch.equal(rank_of_positive(q, g, place), ranks)
            assert torch.equal(topk(q, g, 2)[0], best)
            with pytest.raises(ValueError, match="outside the gallery"):
                rank_of_positive(q, g, place + 300)
        assert watch.seen == ["ieee", "ieee"]
        assert switch.fp32_precision == "tf32"  # as it was, after the error too
    finally:
        torch.set_float32_matmul_precision("highest")
        for each, precision in before.items():
            each.fp32_precision = precision


@needs_switch
def test_the_gpus_switch_is_set_and_reset_by_either_interface():
    # No public function shows it where there is no GPU.
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    try:
        for name, value in (("fp32_precision", "tf32"), ("allow_tf32", True)):
            setattr(switch, name, value)
            with _full_precision(torch.device("cuda")):
                assert switch.fp32_precision == "ieee"
            assert getattr(switch, name) == value
            switch.allow_tf32 = False
    finally:
        switch.fp32_precision = before


def test_unit_rows_keep_double_precision():
    x = normal(50, 8, dtype=torch.float64)
    length = torch.linalg.vector_norm(unit(x), dim=1)
    assert (length - 1).abs().max() < 1e-15
    tiny = torch.full((1, 4), 1e-60, dtype=torch.float64)
    assert unit(tiny).tolist() == [[0.5] * 4]
    assert unit(x.bfloat16()).dtype == torch.bfloat16


def test_memory_stays_at_one_tile():
    calls = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                calls.append(out.numel())
            return out

    q, g = unit(normal(50, 8)), unit(normal(20_000, 8))
    place = torch.arange(8)
    with Watch():
        rank_of_positive(q, g, torch.arange(50), block=256)
    assert max(calls) <= 50 * 256 + 20_000 * 8  # a score matrix has 1,000,000
    calls.clear()
    with Watch():  # nothing but ties: every score is computed twice
        rank_of_positive(torch.ones(8, 2_048), torch.ones(9_000, 2_048), 0 * place)
    assert max(calls) <= max(2**22, 9_000 * 2_048)


def test_released_evaluation_gives_the_same_numbers():
    golden = np.load(GOLDEN / "ranking.npz")
    positive = locate_origins(
        golden["query_ids"].tolist(), golden["gallery_ids"].tolist()
    )
    ranks = ranks_from_scores(-torch.from_numpy(golden["distmat"]).double(), positive)
    mean_ap, acc = map_acc(ranks)
    assert mean_ap == pytest.approx(float(golden["mean_ap"]), abs=1e-12)
    assert acc == pytest.approx(float(golden["cmc"][0]), abs=1e-12)
    assert (ranks <= 5).double().mean() == pytest.approx(golden["cmc"][4], abs=1e-12)


def test_standard_error_is_that_of_a_mean():
    ranks = torch.tensor([1.0, 2.0, 4.0, 1.0])
    expected = np.std([1, 0.5, 0.25, 1], ddof=1) / 2
    assert standard_error(ranks) == pytest.approx(expected)


def _nan(x):
    x = x.clone()
    x[1, 0] = float("nan")
    return x


ROWS = torch.eye(4)
BAD_RANKS = {
    "no query": (ROWS[:0], ROWS, torch.tensor([], dtype=torch.int64), "queries"),
    "no gallery": (ROWS, ROWS[:0], torch.zeros(4, dtype=torch.int64), "gallery"),
    "NaN query": (_nan(ROWS), ROWS, torch.arange(4), r"queries: row 1 holds NaN"),
    "NaN gallery": (ROWS, _nan(ROWS), torch.arange(4), r"gallery: row 1 holds NaN"),
    "origin not there": (ROWS, ROWS[:2], torch.arange(4), "outside the gallery of 2"),
    "no whole numbers": (ROWS, ROWS, torch.ones(4, dtype=torch.bool), "torch.bool"),
    "negative": (ROWS, ROWS, torch.tensor([0, 1, 2, -1]), "holds -1"),
    "too few": (ROWS, ROWS, torch.arange(3), "for each of 4 queries"),
    "widths": (ROWS, torch.ones(4, 5), torch.arange(4), "the gallery 5"),
}


@pytest.mark.parametrize("case", BAD_RANKS)
def test_ranks_refuse(case):
    q, g, positive, message = BAD_RANKS[case]
    with pytest.raises(ValueError, match=message):
        rank_of_positive(q, g, positive)


def test_other_refusals_of_retrieval():
    with pytest.raises(TypeError, match="float16"):
        rank_of_positive(ROWS.half(), ROWS, torch.arange(4))
    with pytest.raises(ValueError, match="block=0"):
        rank_of_positive(ROWS, ROWS, torch.arange(4), block=0)
    with pytest.raises(ValueError, match="k=5: give 1 to 4"):
        topk(ROWS, ROWS, 5)
    with pytest.raises(ValueError, match="row 2 is zero"):
        unit(torch.tensor([[1.0], [2.0], [0.0]]))
    with pytest.raises(ValueError, match="ranks is empty"):
        map_acc(torch.tensor([]))
    with pytest.raises(ValueError, match="below 1 or NaN"):
        map_acc(torch.tensor([1.0, float("nan")]))
    with pytest.raises(ValueError, match="two or more"):
        standard_error(torch.tensor([1.0]))


def test_identifiers_are_located_or_refused():
    assert locate_origins(["b", "a", "b"], ["a", "b"]).tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match="'a' stands twice, at 0 and 2"):
        locate_origins(["a"], ["a", "b", "a"])
    with pytest.raises(ValueError, match="2 origins are not in the gallery, 'x'"):
        locate_origins(["a", "x", "y"], ["a"])
    with pytest.raises(ValueError, match="no query"):
        locate_origins([], ["a"])


# --- the linear map ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scatter_in_chunks_equals_one_shot(dtype):
    o, g = normal(300, 12, seed=1, dtype=dtype), normal(300, 12, seed=2, dtype=dtype)
    whole = PairScatter(12).update(o, g).second_moment
    chunks = PairScatter(12)
    for a, b in zip(o.split(37), g.split(37), strict=True):
        chunks.update(a, b)
    difference = (g - o).double()
    torch.testing.assert_close(chunks.second_moment, whole, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        whole, difference.mT @ difference / 300, atol=1e-6, rtol=0
    )
    assert chunks.count == 300


@pytest.mark.parametrize("lam", [0.0, 0.1, 1.0, 30.0])
def test_whitening_whitens(lam):
    s = spd(20, seed=3)
    w = whitening_transform(s, lam)
    ridged = s + lam * s.trace() / 20 * torch.eye(20, dtype=torch.float64)
    eye = torch.eye(20, dtype=torch.float64)
    torch.testing.assert_close(w.mT @ ridged @ w, eye, atol=1e-8, rtol=0)
    torch.testing.assert_close(w, w.mT)


def test_full_rank_lda_sees_the_same_cosines_as_whitening():
    s, t = spd(12, seed=4), spd(12, seed=5)
    full = lda_transform(s, t, rank=12, lam=0.5)
    white = whitening_transform(s, 0.5)
    torch.testing.assert_close(full @ full.mT, white @ white.mT)


def test_lda_beats_random_directions_under_its_constraint():
    s, t = spd(12, seed=6), spd(12, seed=7)
    eye = torch.eye(12, dtype=torch.float64)
    ridged = s + 0.3 * s.trace() / 12 * eye
    best = lda_transform(s, t, rank=4, lam=0.3)
    torch.testing.assert_close(best.mT @ ridged @ best, eye[:4, :4])
    white = whitening_transform(s, 0.3)
    for seed in range(20):
        frame = torch.linalg.qr(normal(12, 4, seed=seed, dtype=torch.float64)).Q
        other = white @ frame  # any W with W' S W = I is of this form
        assert (other.mT @ t @ other).trace() < (best.mT @ t @ best).trace()


def test_rotating_w_changes_no_cosine():
    z, o = normal(30, 10, seed=8), normal(30, 10, seed=9)
    w = LinearIdentifier.fit(o, z, lam=1.0)
    turn = torch.linalg.qr(normal(10, 10, seed=10)).Q
    turned = LinearIdentifier(w.mean, w.weight @ turn)
    torch.testing.assert_close(turned(z) @ turned(o).mT, w(z) @ w(o).mT)


def test_a_fit_takes_the_precision_of_what_it_is_given():
    o, z = normal(30, 10, seed=8), normal(30, 10, seed=9)
    w = LinearIdentifier.fit(o, z, lam=1.0)
    assert w(z).dtype == torch.float32 and w(z.double()).dtype == torch.float64
    torch.testing.assert_close(w(z.double()).float(), w(z), atol=1e-6, rtol=1e-5)


def test_features_made_elsewhere_give_the_expected_numbers():
    arrays = np.load(GOLDEN / "mini_features.npz")
    z = {key: torch.from_numpy(arrays[key]) for key in arrays.files}
    expected = json.loads((GOLDEN / "mini_features_expected.json").read_text())
    owner = z["train_gen_origin"].long()
    moment = (
        PairScatter(512)
        .update(z["train_origin"].double()[owner], z["train_gen"].double())
        .second_moment
    )
    mean = z["mean"].double()
    describes = {
        "raw": unit,
        "centred": lambda rows: unit(rows - mean),
        "closed_form_lam1": LinearIdentifier(mean, whitening_transform(moment, 1.0)),
    }
    for code in "ABCDE":
        for name, describe in describes.items():
            ranks = rank_of_positive(
                describe(z[f"query_{code}"].double()),
                describe(z["gallery"].double()),
                z[f"gt_{code}"].long(),
                block=200,
            )
            assert map_acc(ranks) == pytest.approx(expected[code][name], abs=2e-3)


def test_fewer_pairs_than_dimensions_need_a_ridge():
    o, g = normal(5, 8, seed=1), normal(5, 8, seed=2)
    with pytest.raises(ValueError, match=r"singular with lam=0.*positive lam"):
        LinearIdentifier.fit(o, g, lam=0.0)
    assert LinearIdentifier.fit(o, g, lam=0.1)(g).shape == (5, 8)


def test_identifier_survives_saving_and_refuses_a_damaged_file(tmp_path):
    o, g = normal(30, 8, seed=1), normal(30, 8, seed=2)
    fitted = LinearIdentifier.fit(o, g, lam=1.0, rank=5)
    path = tmp_path / "w.pt"
    fitted.save(path)
    torch.testing.assert_close(LinearIdentifier.load(path)(g), fitted(g))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"w\.pt is no readable checkpoint"):
        LinearIdentifier.load(path)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        LinearIdentifier.load(tmp_path / "absent.pt")


def test_a_checkpoint_that_runs_code_is_refused(tmp_path):
    class Payload:
        def __reduce__(self):
            return (print, ("executed",))

    path = tmp_path / "evil.pt"
    torch.save({"weight": Payload()}, path)
    with pytest.raises(ValueError, match="plain tensors"):
        load_tensors(path)


BAD_PAIRS = {
    "shapes": (torch.ones(3, 4), torch.ones(2, 4), "one shape"),
    "width": (torch.ones(3, 5), torch.ones(3, 5), "scatter is for 4"),
    "NaN": (torch.ones(3, 4), _nan(torch.ones(3, 4)), "NaN"),
}


@pytest.mark.parametrize("case", BAD_PAIRS)
def test_scatter_refuses(case):
    o, g, message = BAD_PAIRS[case]
    with pytest.raises(ValueError, match=message):
        PairScatter(4).update(o, g)


def test_other_refusals_of_the_linear_map():
    with pytest.raises(ValueError, match="no pair was added"):
        _ = PairScatter(4).second_moment
    with pytest.raises(ValueError, match="square"):
        whitening_transform(torch.ones(2, 3))
    with pytest.raises(ValueError, match="lam=-1"):
        whitening_transform(torch.eye(3), -1)
    with pytest.raises(ValueError, match="lam=inf"):
        whitening_transform(torch.eye(3), float("inf"))
    with pytest.raises(ValueError, match="not symmetric"):
        whitening_transform(torch.ones(3, 3).triu())
    with pytest.raises(ValueError, match="non-empty"):
        whitening_transform(torch.ones(0, 0))
    for dtype in (torch.float16, torch.int64):
        with pytest.raises(TypeError, match=f"scatter is {dtype}"):
            whitening_transform(torch.eye(3, dtype=dtype))
    with pytest.raises(ValueError, match="covariance holds NaN"):
        lda_transform(torch.eye(3), _nan(torch.eye(3)), rank=2)
    with pytest.raises(ValueError, match="covariance holds NaN"):  # of one photo
        LinearIdentifier.fit(torch.ones(1, 3), torch.rand(1, 3), rank=2)
    with pytest.raises(ValueError, match="photos: row 1 holds NaN"):
        LinearIdentifier.fit(
            torch.ones(2, 3), torch.rand(2, 3), photos=_nan(torch.ones(2, 3))
        )
    with pytest.raises(TypeError, match="z_gen is torch.int64"):
        LinearIdentifier.fit(torch.ones(2, 3).long(), torch.ones(2, 3).long())
    with pytest.raises(ValueError, match="rank=4: give 1 to 3"):
        lda_transform(torch.eye(3), torch.eye(3), rank=4)
    with pytest.raises(ValueError, match="embeddings of 3 numbers"):
        LinearIdentifier(torch.zeros(3), torch.eye(3))(torch.ones(2, 4))
    with pytest.raises(ValueError, match="row 1 holds NaN"):
        LinearIdentifier(torch.zeros(3), torch.eye(3))(_nan(torch.ones(2, 3)))


# --- theory --------------------------------------------------------------------------


def test_an_exact_w_exists_below_full_rank_and_not_at_it():
    d = normal(6, 10, seed=1, dtype=torch.float64)
    w = exact_annihilator(d)
    assert w.shape == (10, 4)
    assert (d @ w).abs().max() < 1e-12
    torch.testing.assert_close(w.mT @ w, torch.eye(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="full rank 10"):
        exact_annihilator(normal(40, 10, seed=2, dtype=torch.float64))


def test_smallest_right_singular_vectors_are_the_best_orthonormal_w():
    d = normal(40, 10, seed=3, dtype=torch.float64)
    _, values, vh = torch.linalg.svd(d)
    best = (d @ vh[-3:].mT).square().sum()
    assert best == pytest.approx(values[-3:].square().sum().item(), abs=1e-10)
    for seed in range(50):
        frame = torch.linalg.qr(normal(10, 3, seed=seed, dtype=torch.float64)).Q
        assert (d @ frame).square().sum() >= best


def test_kappa_bounds_every_w_and_is_reached():
    s1, s2 = spd(8, seed=4), spd(8, seed=5)
    eye = torch.eye(8, dtype=torch.float64)
    ridged = s1 + 0.5 * s1.trace() / 8 * eye
    kappa = transfer_constant(s1, s2, lam=0.5)
    for seed in range(50):
        w = normal(8, 3, seed=seed, dtype=torch.float64)
        assert (w.mT @ s2 @ w).trace() <= kappa * (w.mT @ ridged @ w).trace()
    white = whitening_transform(s1, 0.5)
    worst = white @ torch.linalg.eigh(white @ s2 @ white).eigenvectors[:, -1]
    assert worst @ s2 @ worst == pytest.approx((kappa * worst @ ridged @ worst).item())


def test_kappa_of_a_model_to_itself_is_one_without_ridge():
    s = spd(8, seed=6)
    assert transfer_constant(s, s, lam=0.0) == pytest.approx(1)
    assert transfer_constant(s, 3 * s, lam=0.0) == pytest.approx(3)


def test_singular_value_cosine_is_blind_to_what_matters():
    d = normal(50, 20, seed=7, dtype=torch.float64)
    turn = torch.linalg.qr(normal(20, 20, seed=8, dtype=torch.float64)).Q
    assert singular_value_cosine(d, d @ turn) == pytest.approx(1)
    assert singular_value_cosine(d, normal(50, 20, seed=9)) > 0.98  # pure noise
    with pytest.raises(ValueError, match="two"):
        singular_value_cosine(d, d[:3])
    with pytest.raises(ValueError, match="second: row 1 holds NaN"):
        singular_value_cosine(d, _nan(d))
    with pytest.raises(ValueError, match="unseen: row 1 holds NaN"):
        transfer_constant(torch.eye(3), _nan(torch.eye(3)))
    with pytest.raises(ValueError, match="differences: row 1 holds NaN"):
        exact_annihilator(_nan(d))


# --- CosFace -------------------------------------------------------------------------


def _golden_head():
    golden = np.load(GOLDEN / "cosface.npz")
    head = CosFaceHead(8, 10)
    head.centres.data = torch.from_numpy(golden["weight"])
    x = torch.from_numpy(golden["x"]).requires_grad_()
    return golden, head, x, torch.from_numpy(golden["label"]).long()


def test_released_margin_head_gives_the_same_loss_and_gradients():
    golden, head, x, label = _golden_head()
    loss = head.loss(x, label)
    loss.backward()
    for ours, theirs in (
        (head(x, label).detach(), golden["logits"]),
        (loss.detach(), golden["loss"]),
        (x.grad, golden["grad_x"]),
        (head.centres.grad, golden["grad_weight"]),
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_logits_lie_in_their_range_and_ignore_lengths():
    _, head, x, label = _golden_head()
    logits = head(x, label)
    assert logits.max() <= 64 and logits.min() >= -64 * 1.35
    head.centres.data[3] *= 7
    torch.testing.assert_close(head(0.2 * x, label), logits, rtol=1e-4, atol=1e-4)


def test_sampled_classes_give_the_same_logits_in_their_columns():
    _, head, x, label = _golden_head()
    classes = label.unique()
    torch.testing.assert_close(
        head(x, label, classes=classes), head(x, label)[:, classes]
    )
    assert head.loss(x, label, classes=torch.arange(10)) == head.loss(x, label)
    with pytest.raises(ValueError, match="leave out"):
        head(x, label, classes=classes[1:])


@pytest.mark.parametrize("is_sampled", [False, True])
def test_a_cosface_step_reads_no_value_off_the_device(is_sampled):
    # On the meta device there are no values: reading one is an error.
    head = CosFaceHead(8, 10).to("meta")
    x, label = torch.empty(4, 8, device="meta"), torch.arange(4, device="meta")
    classes = torch.arange(6, device="meta") if is_sampled else None
    head.loss(x, label, classes=classes).backward()
    with pytest.raises(ValueError, match=r"one \(int64\) for each row"):
        head.loss(x, label[:3], classes=classes)


def test_cosface_compiles_as_one_graph():
    _, head, x, label = _golden_head()
    classes = torch.arange(10)
    compiled = torch.compile(head.loss, backend="eager", fullgraph=True)
    assert compiled(x, label) == head.loss(x, label)
    assert compiled(x, label, classes=classes) == head.loss(x, label)
    without = classes[classes != label[0]]
    with pytest.raises(RuntimeError, match="out of bounds"):  # never a silent number
        compiled(x, label, classes=without)


def test_cosface_gradients_are_right():
    head = CosFaceHead(5, 6, scale=4.0).double()
    x = normal(4, 5, dtype=torch.float64).requires_grad_()
    label = torch.tensor([0, 5, 2, 2])
    assert torch.autograd.gradcheck(lambda x: head.loss(x, label), (x,))


def test_released_schedule_gives_the_same_rates():
    golden = json.loads((GOLDEN / "lr_schedule.json").read_text())
    assert [paper_lr(e) for e in range(25)] == pytest.approx(golden, abs=1e-9)
    with pytest.raises(ValueError, match="epoch=25"):
        paper_lr(25)


def _toy_pairs():
    """Origins whose last ten of sixteen numbers are scrambled by translation."""
    o = normal(60, 16, seed=1)
    shape = torch.cat([torch.full((6,), 0.1), torch.full((10,), 3.0)])
    owner = torch.arange(60).repeat(4)
    return o, o[owner] + shape * normal(240, 16, seed=2), owner, shape


@pytest.mark.parametrize("init", ["identity", "default"])
def test_training_learns_which_numbers_an_edit_spares(init):
    o, g, owner, shape = _toy_pairs()
    config = CosFaceConfig(num_steps=200, lr=1e-2, centre_lr=1e-2, init=init)
    network, curve = train_cosface(
        o, g, owner, config=config, generator=make_generator(0)
    )
    assert np.mean(curve[-20:]) < 0.3 * np.mean(curve[:20])
    fresh = o + shape * normal(60, 16, seed=3)
    trained = map_acc(
        rank_of_positive(unit(network(fresh)), unit(network(o)), owner[:60])
    )
    raw = map_acc(rank_of_positive(unit(fresh), unit(o), owner[:60]))
    closed = LinearIdentifier.fit(o[owner], g, lam=0.01)
    closed = map_acc(rank_of_positive(closed(fresh), closed(o), owner[:60]))
    assert trained[0] > raw[0] + 0.2
    assert closed[0] > raw[0] + 0.5


def test_training_repeats_by_its_generator():
    o, g, owner, _ = _toy_pairs()
    config = CosFaceConfig(num_steps=5, num_layers=2, init="default", num_classes=30)
    runs = [
        train_cosface(o, g, owner, config=config, generator=make_generator(s))[1]
        for s in (0, 0, 1)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_a_plain_network_has_the_layers_asked_for():
    config = CosFaceConfig(num_layers=3, init="default", hidden=9, width=4)
    network = make_network(6, config, generator=make_generator(0))
    assert [tuple(p.shape) for p in network.parameters()] == [
        (9, 6), (9,), (9, 9), (9,), (4, 9),
    ]  # fmt: skip
    single = make_network(6, CosFaceConfig())
    torch.testing.assert_close(single(torch.eye(6)), torch.eye(6))


def test_refusals_of_training():
    o, g, owner, _ = _toy_pairs()
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.5"):
        CosFaceHead(3, 6)(torch.ones(1, 3), torch.tensor([6]))
    with pytest.raises(ValueError, match="give at least 1 and 2"):
        CosFaceHead(3, 1)
    with pytest.raises(ValueError, match=r"0\.\.59"):
        train_cosface(o, g, owner + 1)
    with pytest.raises(ValueError, match="NaN"):
        train_cosface(o, _nan(g), owner)
    with pytest.raises(ValueError, match="origin_of"):
        train_cosface(o, g, owner[:5])
    for wrong in (torch.tensor([0, 1]), torch.tensor([0.0])):  # silent once
        with pytest.raises(ValueError, match=r"one \(int64\) for each row"):
            CosFaceHead(3, 6)(torch.ones(1, 3), wrong)
    with pytest.raises(ValueError, match=r"x=\(1, 4\): give \(N, 3\)"):
        CosFaceHead(3, 6)(torch.ones(1, 4), torch.tensor([0]))
    with pytest.raises(ValueError, match="scale=0, margin=0.35"):
        CosFaceHead(3, 6, scale=0)
    with pytest.raises(ValueError, match="num_steps=0"):
        train_cosface(o, g, owner, config=CosFaceConfig(num_steps=0))
    with pytest.raises(ValueError, match="lr=-1"):
        train_cosface(o, g, owner, config=CosFaceConfig(lr=-1))
    with pytest.raises(TypeError, match="z_gen is torch.float16"):
        train_cosface(o.half(), g.half(), owner)
    with pytest.raises(ValueError, match="origin_of.*float32"):
        train_cosface(o, g, owner.float())
    with pytest.raises(ValueError, match="init='default'"):
        make_network(6, CosFaceConfig(num_layers=2))


# --- autoencoders and attacks --------------------------------------------------------


def _taef2():
    folder = data.fetch("taef2")
    return load_taef2(folder / "taef2_encoder.pth", folder / "taef2_decoder.pth")


@pytest.mark.benchmark_data("taef2")
def test_taef2_gives_its_own_latents():
    golden = np.load(GOLDEN / "taef2.npz")
    vae = _taef2()
    images = torch.from_numpy(golden["image64_uint8"]).permute(0, 3, 1, 2) / 255
    small = torch.nn.functional.avg_pool2d(images, 2)
    with torch.no_grad():
        decoded = vae.decode(torch.from_numpy(golden["latent32"]))
    np.testing.assert_allclose(encode(vae, images), golden["latent64"], atol=1e-4)
    np.testing.assert_allclose(encode(vae, small), golden["latent32"], atol=1e-4)
    np.testing.assert_allclose(decoded, golden["decoded32"], atol=2e-3)
    torch.testing.assert_close(
        embed(vae, small, batch_size=2), encode(vae, small).flatten(1)
    )


def test_taef2_has_the_described_size():
    vae = TAEF2()
    sizes = [sum(p.numel() for p in m.parameters()) for m in (vae.encoder, vae.decoder)]
    assert sizes == [1_338_528, 1_338_499]
    with torch.no_grad():
        z = vae.encode(torch.rand(1, 3, 16, 24))
        assert z.shape == (1, 32, 2, 3)
        assert vae.decode(z).shape == (1, 3, 16, 24)


def test_diffusers_autoencoders_are_embedded_alike():
    from diffusers import AutoencoderKL, AutoencoderTiny

    images = torch.rand(3, 3, 16, 16, generator=make_generator(0))
    torch.manual_seed(0)
    kl = AutoencoderKL(norm_num_groups=1, block_out_channels=(4,), latent_channels=4)
    tiny = AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    )
    mode = kl.encode(2 * images - 1).latent_dist.mode().flatten(1)
    torch.testing.assert_close(embed(kl, images, batch_size=2), mode.detach())
    latents = tiny.encode(2 * images - 1).latents.flatten(1)
    torch.testing.assert_close(embed(tiny, images), latents.detach())
    assert decode(tiny, encode(tiny, images)).shape == images.shape
    with pytest.raises(ValueError, match="multiples of 2"):
        embed(tiny, torch.rand(1, 3, 15, 16))


def test_block_pca_is_exact_with_all_components():
    images = torch.rand(40, 3, 8, 8, generator=make_generator(0))
    full = BlockPCA.fit(images, 48, block=4)
    torch.testing.assert_close(full.decode(full.encode(images)), images)
    few = BlockPCA.fit(images, 10, block=4)
    torch.testing.assert_close(
        few.basis.mT @ few.basis, torch.eye(10), atol=1e-5, rtol=0
    )
    z = few.encode(images)
    assert z.shape == (40, 10, 2, 2)
    torch.testing.assert_close(few.encode(few.decode(z)), z, atol=1e-5, rtol=0)


def test_refusals_of_embedding():
    vae = TAEF2()
    with pytest.raises(ValueError, match=r"\(N, 3, H, W\)"):
        embed(vae, torch.rand(2, 1, 16, 16))
    with pytest.raises(ValueError, match="multiples of 8"):
        embed(vae, torch.rand(2, 3, 16, 20))
    with pytest.raises(ValueError, match="NaN"):
        embed(vae, torch.full((1, 3, 16, 16), float("nan")))
    with pytest.raises(ValueError, match=r"images go from 0 to 255: give \[0, 1\]"):
        embed(vae, torch.tensor([0.0, 255.0]).expand(1, 3, 8, 2).repeat(1, 1, 1, 4))
    for dtype in (torch.uint8, torch.float64):
        with pytest.raises(TypeError, match=f"{dtype}, the autoencoder is torch.fl"):
            embed(vae, torch.zeros(1, 3, 16, 16, dtype=dtype))
    with pytest.raises(ValueError, match="multiples of 8"):
        embed(vae, torch.rand(1, 3, 0, 8))
    with pytest.raises(ValueError, match="batch_size=0"):
        embed(vae, torch.rand(1, 3, 8, 8), batch_size=0)
    with pytest.raises(ValueError, match="nothing to embed"):
        embed(vae, torch.rand(0, 3, 16, 16))


def test_attacks_keep_shape_and_change_images():
    images = (torch.rand(3, 3, 32, 32, generator=make_generator(0)) * 255).round() / 255
    for name, attack in ATTACKS.items():
        changed = attack(images)
        assert changed.shape == images.shape, name
        assert changed.min() >= -1e-6 and changed.max() <= 1 + 1e-6, name
        assert (changed - images).abs().mean() > 1e-3, name
    torch.testing.assert_close(crop(images, share=1.0), images)
    flat = torch.full((1, 3, 8, 8), 0.4)
    torch.testing.assert_close(blur(flat, sigma=1.0), flat)
    assert (jpeg(flat, quality=95) - flat).abs().max() < 0.02
    with pytest.raises(ValueError, match="quality=0"):
        jpeg(images, quality=0)
    with pytest.raises(ValueError, match="sigma=0"):
        blur(images, sigma=0)
    with pytest.raises(ValueError, match="sigma=20: give pixels above 0, up to 10.3"):
        blur(images, sigma=20)
    with pytest.raises(ValueError, match="share=2"):
        crop(images, share=2)


def test_crop_keeps_the_middle_of_each_side():
    wide = torch.arange(32.0).repeat(1, 3, 8, 1) / 31
    torch.testing.assert_close(crop(wide, share=1.0), wide)
    half = crop(wide, share=0.5)
    assert half.shape == wide.shape
    # Bilinear: output i lies at 8 + (i + 1/2) / 2 - 1/2 of the input, kept in 8..23.
    place = (7.75 + torch.arange(32) / 2).clamp(8, 23)
    torch.testing.assert_close(half, (place / 31).expand_as(half))
    torch.testing.assert_close(crop(wide.mT, share=0.5), half.mT)
