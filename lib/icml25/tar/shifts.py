"""Graphs whose test nodes come from elsewhere: GOOD's splits, and data to split."""

from __future__ import annotations

import networkx as nx
import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import degree, to_undirected

from icml25.core import data as registry

__all__ = ["cbas", "citation", "good_split", "hard_region", "imbalanced", "webkb"]

MASKS = ("train_mask", "ood_val_mask", "ood_test_mask", "id_val_mask", "id_test_mask")
# GOOD's concept shift: five buckets; which train, how many of the candidates each
# picks, and the share of them whose label agrees with the sign of their domain.
_CONCEPT_TRAINS = (True, False, True, True, False)
_CONCEPT_PICKS = (0.4, 0.6, 0.5, 1.0, 1.0)
CONCEPT_BIAS = (0.95, 0.95, 0.9, 0.85, 0.5)
WEBKB_BIAS = (0.85, 0.75, 0.85, 0.8, 0.5)
_COLORS = ((1, 0, 0, 0.5), (0, 1, 0, 0.7), (0, 0, 1, 0.3))
_COVARIATE_COLORS = (*_COLORS, (1, 1, 0, 0.4), (0, 1, 1, 0.6))
# Each university numbers its classes in its own order: own number -> Cornell's.
_WEBKB_MATCH = {
    "cornell": (0, 1, 2, 3, 4),
    "texas": (0, 1, 4, 3, 2),
    "wisconsin": (1, 0, 3, 2, 4),
}
_VAL_COLOR, _TEST_COLOR = (1, 0, 1, 1), (0, 0, 0, 0.1)
_CONCEPT_COLORS = (*_COLORS, (1, 1, 0, 0.2))
_CONCEPT_COLORED = (0.95, 0.9, 0.85, 0.8, 0.75)


def good_split(
    domain: Tensor,
    y: Tensor,
    kind: str,
    *,
    generator: torch.Generator,
    bias: tuple[float, ...] = CONCEPT_BIAS,
    num_envs: int = 10,
) -> dict[str, Tensor]:
    """Split nodes by a domain value as the GOOD benchmark does.

    *Covariate*: the highest 60 % of domain values train, the next 20 % are the shifted
    validation set, the lowest 20 % the shifted test set; equal values stay together.
    *Concept*: in the training nodes, label and domain go together; in the test nodes
    the other way round; in the shifted validation set not at all.

    Args:
        domain: ``(n,)`` value of each node, such as its degree.
        y: ``(n,)`` int64 labels.
        kind: ``"covariate"`` or ``"concept"``.
        generator: CPU generator.
        bias: concept only, share of agreeing nodes in each of GOOD's five buckets.
        num_envs: covariate only, training environments to aim for.

    Returns:
        Five disjoint ``(n,)`` bool masks ``train_mask``, ``ood_val_mask``,
        ``ood_test_mask``, ``id_val_mask``, ``id_test_mask`` and ``env_id``, int64, -1
        outside training.

    Raises:
        ValueError: an unknown ``kind``; sizes that differ; domain values that are not
            finite; ``num_envs < 1``; ``bias`` not five shares; domain values so few
            that a shifted set would be empty.

    Notes:
        Vectorised: milliseconds at 170,000 nodes, where loops over nodes take minutes.

    Source: the rules of the GOOD benchmark's data scripts, written anew.
    """
    if kind not in ("covariate", "concept"):
        raise ValueError(f"kind={kind!r}: allowed are 'covariate' and 'concept'")
    if domain.ndim != 1 or domain.shape != y.shape or not domain.numel():
        raise ValueError(
            f"domain has shape {tuple(domain.shape)}, y {tuple(y.shape)}: one value "
            "and one label per node are needed"
        )
    if domain.is_floating_point() and not bool(domain.isfinite().all()):
        raise ValueError("domain holds NaN or infinite values; finite ones are needed")
    if num_envs < 1:
        raise ValueError(f"num_envs={num_envs}: at least 1")
    if len(bias) != 5 or not all(0 <= share <= 1 for share in bias):
        raise ValueError(f"bias={bias}: five shares from 0 to 1 are needed")
    if kind == "covariate":
        env_id, val, test = _covariate(domain, num_envs)
        held_out = int(0.1 * domain.numel())
    else:
        env_id, val, test = _concept(domain, y, bias, generator)
        held_out = int(0.15 * int((env_id >= 0).sum()))
    if not (val.any() and test.any()):
        raise ValueError(
            f"domain has {domain.unique().numel()} values, too few to cut off shifted "
            "sets between them"
        )
    return _masks(env_id, val, test, held_out, generator)


def _masks(
    env_id: Tensor, val: Tensor, test: Tensor, held_out: int, generator: torch.Generator
) -> dict[str, Tensor]:
    train = (env_id >= 0).nonzero().squeeze(1)
    train = train[torch.randperm(len(train), generator=generator)]
    id_val, id_test = train[:held_out], train[held_out : 2 * held_out]
    masks = {name: torch.zeros_like(val) for name in MASKS}
    masks["train_mask"][train[2 * held_out :]] = True
    masks["ood_val_mask"], masks["ood_test_mask"] = val, test
    masks["id_val_mask"][id_val] = True
    masks["id_test_mask"][id_test] = True
    env_id = torch.where(masks["train_mask"], env_id, -1)
    return {**masks, "env_id": env_id}


def _covariate(domain: Tensor, num_envs: int) -> tuple[Tensor, Tensor, Tensor]:
    n = domain.numel()
    order = torch.argsort(domain, descending=True, stable=True)
    value = domain[order]
    # Places where a new domain begins: the only places to cut.
    borders = (value[1:] != value[:-1]).nonzero().squeeze(1) + 1
    borders = torch.cat([borders, borders.new_tensor([n])])

    def cut(at: int) -> int:
        return int(borders[torch.searchsorted(borders, at).clamp_max(len(borders) - 1)])

    end = cut(int(0.6 * n))
    val_end = cut(max(int(0.8 * n), end))
    env_id = torch.full_like(order, -1)
    begin, size = 0, -(-end // num_envs)
    for env in range(num_envs):
        stop = end if env == num_envs - 1 else min(cut(begin + size), end)
        env_id[order[begin:stop]] = env
        begin = stop
        if begin >= end:
            break
    val, test = torch.zeros(2, n, dtype=torch.bool)
    val[order[end:val_end]] = True
    test[order[val_end:]] = True
    return env_id, val, test


def _concept(
    domain: Tensor, y: Tensor, bias: tuple[float, ...], generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    n = domain.numel()
    number = torch.unique(domain, return_inverse=True)[1]
    size = torch.bincount(number)
    # +1 for the low domains, until half of the nodes have been passed.
    passed = torch.cumsum(size, 0) - size
    sign = torch.where(passed < n / 2, 1, -1)[number]
    deviation = y.double() - y.double().mean()
    bucket = torch.full((n,), -1)
    for place, (trains, pick, share) in enumerate(
        zip(_CONCEPT_TRAINS, _CONCEPT_PICKS, bias, strict=True)
    ):
        free = bucket < 0
        # The last bucket, shifted validation, takes what is left.
        if place == 4:
            bucket[free] = place
            break
        agrees = sign * deviation * (1 if trains else -1) > 0
        u1, u2 = torch.rand(2, n, generator=generator)
        taken = free & torch.where(agrees, u1 < share, u1 > share) & (u2 < pick)
        taken |= _missing_kind(number, agrees, free, taken)
        bucket[taken] = place
    env_of_bucket = torch.tensor([0, -1, 1, 2, -1])
    return env_of_bucket[bucket], bucket == 4, bucket == 1


def _missing_kind(
    number: Tensor, agrees: Tensor, free: Tensor, taken: Tensor
) -> Tensor:
    """One candidate of the absent kind for each domain that gave only the other."""
    key = 2 * number + agrees.long()
    slots = 2 * int(number.max()) + 2
    has_free = torch.bincount(key[free], minlength=slots).view(-1, 2) > 0
    has_taken = torch.bincount(key[taken], minlength=slots).view(-1, 2) > 0
    one_sided = has_free.all(1) & (has_taken.sum(1) == 1)
    wanted = (one_sided[:, None] & ~has_taken).view(-1)
    place = torch.arange(len(key))
    first = torch.full((slots,), len(key)).scatter_reduce(
        0, key[free], place[free], "amin"
    )
    chosen = torch.zeros_like(free)
    chosen[first[wanted]] = True
    return chosen


def cbas(kind: str, *, generator: torch.Generator) -> Data:
    """GOOD-CBAS, generated: 80 houses on a Barabasi-Albert graph, coloured nodes.

    700 nodes in four classes (base, middle, bottom, top of a house); the structure
    tells the class, the four colour channels mislead. *Covariate*: each training
    environment has its own colour, the shifted sets have new ones. *Concept*: in
    training the colour goes with the class (95 to 75 %), in the shifted test set never
    more than by chance.

    Args:
        kind: ``"covariate"`` or ``"concept"``.
        generator: CPU generator.

    Returns:
        PyG ``Data`` with ``x (700, 4)``, ``edge_index``, ``y``, GOOD's five masks and
        ``env_id``.

    Raises:
        ValueError: an unknown ``kind``.
    """
    if kind not in ("covariate", "concept"):
        raise ValueError(f"kind={kind!r}: allowed are 'covariate' and 'concept'")
    edge_index, y = _houses(generator)
    n = y.numel()
    order = torch.randperm(n, generator=generator)
    train_end, val_end = (560, 630) if kind == "covariate" else (420, 560)
    env_id = torch.full((n,), -1)
    env_id[order[:train_end]] = torch.arange(5).repeat_interleave(train_end // 5)
    val, test = torch.zeros(2, n, dtype=torch.bool)
    val[order[train_end:val_end]] = True
    test[order[val_end:]] = True
    if kind == "covariate":
        palette = torch.tensor((*_COVARIATE_COLORS, _VAL_COLOR, _TEST_COLOR))
        x = palette[torch.where(val, 5, torch.where(test, 6, env_id))]
    else:
        colored = torch.tensor((*_CONCEPT_COLORED, 0.3, 0.0))
        chance = colored[torch.where(val, 5, torch.where(test, 6, env_id))]
        random = torch.randint(4, (n,), generator=generator)
        follows = torch.rand(n, generator=generator) < chance
        x = torch.tensor(_CONCEPT_COLORS)[torch.where(follows, y, random)]
    held_out = 70 if kind == "covariate" else 140
    split = _masks(env_id, val, test, held_out, generator)
    return Data(x=x.float(), edge_index=edge_index, y=y, **split)


def _houses(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    seed = int(torch.randint(2**31, (), generator=generator))
    base = nx.barabasi_albert_graph(300, 5, seed=seed)
    first = 300 + 5 * torch.arange(80)
    house = torch.tensor([(0, 1), (1, 2), (2, 3), (3, 0), (0, 4), (1, 4)])
    walls = (first[:, None, None] + house).view(-1, 2)
    ground = torch.randperm(300, generator=generator)[:80]
    edges = [torch.tensor(list(base.edges)), walls, torch.stack([ground, first], 1)]
    y = torch.zeros(300, dtype=torch.int64)
    y = torch.cat([y, torch.tensor([1, 1, 2, 2, 3]).repeat(80)])
    return to_undirected(torch.cat(edges).T), y


def citation(
    name: str, domain: str, kind: str, *, generator: torch.Generator, dim: int = 128
) -> Data:
    """Cora or CiteSeer with GOOD's split rule.

    Args:
        name: ``"Cora"`` or ``"CiteSeer"``.
        domain: ``"word"`` (number of words of a paper) or ``"degree"``.
        kind: ``"covariate"`` or ``"concept"``.
        generator: CPU generator.
        dim: singular directions of the word matrix kept as features.

    Raises:
        ValueError: an unknown ``domain``.
        DataError: the files are not here (see ``python -m icml25 data planetoid``).
    """
    from torch_geometric.datasets import Planetoid

    data = Planetoid(str(registry.working_copy("planetoid")), name)[0]
    if domain == "word":
        value = (data.x > 0).sum(1)
    elif domain == "degree":
        value = degree(data.edge_index[0], data.num_nodes).long()
    else:
        raise ValueError(f"domain={domain!r}: allowed are 'word' and 'degree'")
    split = good_split(value, data.y, kind, generator=generator)
    x = _reduce(data.x, dim)
    return Data(x=x, edge_index=to_undirected(data.edge_index), y=data.y, **split)


def imbalanced(
    name: str, *, generator: torch.Generator, dim: int = 128, num_rare: int = 3
) -> Data:
    """Cora or CiteSeer with some classes cut to a tenth in training.

    The shifted sets are balanced (30 and 60 nodes a class), so that accuracy on them is
    the mean of the classes' accuracies. Which classes are rare is drawn.

    Args:
        name: ``"Cora"`` or ``"CiteSeer"``.
        generator: CPU generator.
        dim: singular directions of the word matrix kept as features.
        num_rare: classes cut, from 1 to all but one.

    Returns:
        PyG ``Data`` with the five masks, ``env_id`` (all 0) and ``is_rare (n,)``, the
        nodes of the rare classes. What is cut away keeps its place in the graph, in no
        mask.

    Raises:
        ValueError: ``num_rare`` out of range.
        DataError: the files are not here (see ``python -m icml25 data planetoid``).
    """
    from torch_geometric.datasets import Planetoid

    data = Planetoid(str(registry.working_copy("planetoid")), name)[0]
    n, num_classes = data.num_nodes, int(data.y.max()) + 1
    if not 1 <= num_rare < num_classes:
        raise ValueError(f"num_rare={num_rare}: 1 to {num_classes - 1}")
    rare = torch.randperm(num_classes, generator=generator)[:num_rare]
    is_rare = torch.isin(data.y, rare)
    # Place of each node in the shuffled order of its class.
    order = torch.randperm(n, generator=generator)
    order = order[torch.argsort(data.y[order], stable=True)]
    size = torch.bincount(data.y, minlength=num_classes)
    place = torch.empty(n, dtype=torch.int64)
    place[order] = torch.arange(n) - (size.cumsum(0) - size)[data.y[order]]
    val, test = place < 30, (place >= 30) & (place < 90)
    keep = torch.where(is_rare, 90 + (size[data.y] - 90) // 10, n)
    env_id = torch.where((place >= 90) & (place < keep), 0, -1)
    split = _masks(env_id, val, test, int((env_id == 0).sum()) // 10, generator)
    x, edge_index = _reduce(data.x, dim), to_undirected(data.edge_index)
    return Data(x=x, edge_index=edge_index, y=data.y, is_rare=is_rare, **split)


def webkb(
    kind: str,
    *,
    generator: torch.Generator,
    dim: int = 128,
    match_labels: bool = False,
) -> Data:
    """Web pages of three universities as one graph, split by university.

    *Covariate*: Cornell and Texas train (two environments), Wisconsin is halved into
    the shifted sets. *Concept*: as :func:`good_split`, with GOOD's bias for WebKB.

    Args:
        kind: ``"covariate"`` or ``"concept"``.
        generator: CPU generator.
        dim: singular directions of the word matrix kept as features.
        match_labels: renumber the classes of Texas and Wisconsin in Cornell's order.
            The files number them differently: without it, a classifier that is right
            at Wisconsin counts as wrong (found by classifying one university with the
            words of another).

    Raises:
        ValueError: an unknown ``kind``.
        DataError: the files are not here (see ``python -m icml25 data webkb``).

    Notes:
        GOOD reads files in which Cornell's pages are those of Texas; these copies
        hold Cornell's own.
    """
    if kind not in ("covariate", "concept"):
        raise ValueError(f"kind={kind!r}: allowed are 'covariate' and 'concept'")
    x, y, edges, school = [], [], [], []
    for place, name in enumerate(("cornell", "texas", "wisconsin")):
        with np.load(registry.fetch("webkb", f"{name}.npz")) as stored:
            edges.append(torch.as_tensor(stored["edges"]) + sum(map(len, y)))
            x.append(torch.as_tensor(stored["node_features"]))
            label = torch.as_tensor(stored["node_labels"])
        if match_labels:
            label = torch.tensor(_WEBKB_MATCH[name])[label]
        y.append(label)
        school.append(torch.full((len(y[-1]),), place))
    school, y = torch.cat(school), torch.cat(y)
    if kind == "concept":
        split = good_split(school, y, kind, generator=generator, bias=WEBKB_BIAS)
    else:
        env_id = torch.where(school < 2, school, -1)
        shifted = (school == 2).nonzero().squeeze(1)
        shifted = shifted[torch.randperm(len(shifted), generator=generator)]
        val, test = torch.zeros(2, len(y), dtype=torch.bool)
        val[shifted[: len(shifted) // 2]] = True
        test[shifted[len(shifted) // 2 :]] = True
        split = _masks(env_id, val, test, len(y) // 10, generator)
    edge_index = to_undirected(torch.cat(edges).T)
    return Data(x=_reduce(torch.cat(x), dim), edge_index=edge_index, y=y, **split)


def _reduce(x: Tensor, dim: int) -> Tensor:
    """Leading singular directions, scaled to unit mean square."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.linalg import svds

    start = np.ones(min(x.shape))
    left, size, _ = svds(csr_matrix(x.double().numpy()), k=dim, v0=start)
    reduced = torch.as_tensor((left * size)[:, ::-1].copy(), dtype=torch.float32)
    return reduced / reduced.square().mean().sqrt()


def hard_region(
    *,
    generator: torch.Generator,
    num_nodes: int = 1200,
    share: float = 0.2,
    noise: float = 0.0,
) -> Data:
    """Regions of a graph where another rule holds: a shift that follows edges.

    Nodes lie in the unit square, joined to their near neighbours; the left half is one
    class, the right half the other. Outside of eight discs the first feature tells the
    class; in them it tells the opposite, and the second feature tells the class.
    Training nodes lie everywhere; the shifted sets only in the discs.

    Args:
        generator: CPU generator.
        num_nodes: n.
        share: share of the square that the discs cover.
        noise: share of the training nodes with a random label.

    Returns:
        PyG ``Data`` with ``x (n, 2)``, ``pos (n, 2)``, ``edge_index``, ``y``, the five
        masks, ``env_id`` (all 0: nobody says where the discs are) and ``in_disc (n,)``.

    Raises:
        ValueError: ``share`` or ``noise`` outside [0, 0.5).
    """
    for name, value in (("share", share), ("noise", noise)):
        if not 0 <= value < 0.5:
            raise ValueError(f"{name}={value}: must lie in [0, 0.5)")
    n = num_nodes
    pos = torch.rand(n, 2, generator=generator)
    # On average 12 neighbours within the radius. In float64, so that no pair at its
    # rim depends on the processor's rounding.
    near = torch.cdist(pos.double(), pos.double()) < (12 / (torch.pi * n)) ** 0.5
    edge_index = near.fill_diagonal_(False).nonzero().T
    centre = torch.cartesian_prod(torch.tensor([0.2, 0.8]), torch.arange(4) / 4 + 0.125)
    in_disc = torch.cdist(pos, centre).amin(1) < (share / (8 * torch.pi)) ** 0.5
    y = (pos[:, 0] > 0.5).long()
    sign = 2.0 * y - 1
    told = torch.stack(
        [torch.where(in_disc, -sign, sign), torch.where(in_disc, sign, 0.0)], 1
    )
    x = told + torch.randn(n, 2, generator=generator)
    role = torch.rand(n, generator=generator)
    # Two fifths of the discs' nodes train, one fifth validates, two fifths test.
    val = in_disc & (role > 0.4) & (role < 0.6)
    test = in_disc & (role >= 0.6)
    env_id = torch.where(val | test, -1, 0)
    split = _masks(env_id, val, test, n // 10, generator)
    noisy = split["train_mask"] & (torch.rand(n, generator=generator) < noise)
    y[noisy] = torch.randint(2, (int(noisy.sum()),), generator=generator)
    return Data(
        x=x, pos=pos, edge_index=edge_index, y=y, in_disc=in_disc, noisy=noisy, **split
    )
