"""Trees in hyperbolic space, in floating-point expansions.

The method of van Spengler and Mettes (2025).

``embed_tree`` places a tree in the Poincare ball, a level at a time; ``Expansion`` is
the arithmetic that lets ordinary floats reach far enough out; ``sphere_points`` finds
the directions; ``distance_to_prototypes`` puts the embedded nodes on top of a network.
"""

from icml25.hsdte.distances import (
    distance_to_prototypes,
    pairwise_distance,
    poincare_distance,
)
from icml25.hsdte.embedding import TreeEmbedding, embed_tree, max_scale
from icml25.hsdte.expansion import Expansion, max_radius
from icml25.hsdte.experiments import EXPERIMENTS
from icml25.hsdte.metrics import Distortion
from icml25.hsdte.sphere import sphere_points
from icml25.hsdte.trees import RootedTree

__all__ = [
    "EXPERIMENTS",
    "Distortion",
    "Expansion",
    "RootedTree",
    "TreeEmbedding",
    "distance_to_prototypes",
    "embed_tree",
    "max_radius",
    "max_scale",
    "pairwise_distance",
    "poincare_distance",
    "sphere_points",
]
