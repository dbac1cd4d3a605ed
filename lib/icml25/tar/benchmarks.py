"""Benchmark graphs from outside, split by GOOD's rules: Cora, CiteSeer, WebKB."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import degree, to_undirected

from icml25.core import data as registry
from icml25.tar.shifts import assign_masks, good_split

__all__ = ["citation", "imbalanced", "webkb"]

WEBKB_BIAS = (0.85, 0.75, 0.85, 0.8, 0.5)
# Each university numbers its classes in its own order: own number -> Cornell's.
_WEBKB_MATCH = {
    "cornell": (0, 1, 2, 3, 4),
    "texas": (0, 1, 4, 3, 2),
    "wisconsin": (1, 0, 3, 2, 4),
}


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
    split = assign_masks(env_id, val, test, int((env_id == 0).sum()) // 10, generator)
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
        split = assign_masks(env_id, val, test, len(y) // 10, generator)
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
