"""The built book, shared by the page tests and the browser tests."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
HTML = ROOT / "_build" / "html"
# Set by whoever has just built the book, so that it is not built twice.
BUILT = "ICML25_BOOK_HTML"


def build(shared: Path) -> Path:
    """Build the book once per test session, from clean and with warnings as errors.

    Args:
        shared: a folder that all workers of the session see.

    Returns:
        The folder with the pages.

    Raises:
        RuntimeError: the build failed; the message carries its output.
    """
    if given := os.environ.get(BUILT):
        return Path(given)
    with (shared / "book.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        log = shared / "book.log"
        if not log.exists():
            log.write_text(run(ROOT))
    if text := log.read_text():
        raise RuntimeError(f"the book does not build:\n{text}")
    return HTML


def run(root: Path) -> str:
    """Build the book under ``root``: its output where that failed, else nothing."""
    # Jupyter Book forgets the warnings of pages that it does not have to read again.
    shutil.rmtree(root / "_build", ignore_errors=True)
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("jupyter-book")),
            *("build", str(root), "-n", "-W", "--keep-going", "--quiet"),
        ],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "lib")},
        capture_output=True,
        text=True,
    )
    output = (done.stdout + done.stderr)[-8000:]
    return output or "it failed without a word" if done.returncode else ""


def pages() -> list[str]:
    """The document names of the table of contents, in order."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    found = [toc["root"]]

    def collect(entries: list[dict]) -> None:
        for entry in entries:
            found.append(entry["file"])
            collect(entry.get("sections", []))

    for part in toc["parts"]:
        collect(part["chapters"])
    return found


def notebooks() -> list[str]:
    """The chapters of the table of contents."""
    return [page for page in pages() if page.startswith("notebooks/")]
