"""Graphs whose test nodes come from elsewhere: GOOD's splits, and data to split."""

from __future__ import annotations

import networkx as nx
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

__all__ = ["cbas", "good_split", "hard_region"]

MASKS = ("train_mask", "ood_val_mask", "ood_test_mask", "id_val_mask", "id_test_mask")
# GOOD's concept shift: five buckets; which train, how many of the candidates each
# picks, and the share of them whose label agrees with the sign of their domain.
_CONCEPT_TRAINS = (True, False, True, True, False)
_CONCEPT_PICKS = (0.4, 0.6, 0.5, 1.0, 1.0)
CONCEPT_BIAS = (0.95, 0.95, 0.9, 0.85, 0.5)
_COLORS = ((1, 0, 0, 0.5), (0, 1, 0, 0.7), (0, 0, 1, 0.3))
_COVARIATE_COLORS = (*_COLORS, (1, 1, 0, 0.4), (0, 1, 1, 0.6))
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
    return assign_masks(env_id, val, test, held_out, generator)


def assign_masks(
    env_id: Tensor, val: Tensor, test: Tensor, held_out: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """GOOD's five masks: two blocks of ``held_out`` nodes leave training at random."""
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
    split = assign_masks(env_id, val, test, held_out, generator)
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
    split = assign_masks(env_id, val, test, n // 10, generator)
    noisy = split["train_mask"] & (torch.rand(n, generator=generator) < noise)
    y[noisy] = torch.randint(2, (int(noisy.sum()),), generator=generator)
    return Data(
        x=x, pos=pos, edge_index=edge_index, y=y, in_disc=in_disc, noisy=noisy, **split
    )
