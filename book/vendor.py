"""The browser files that the book carries, so that a page needs no network.

    python book/vendor.py            compare the files with the table in VERSIONS.md
    python book/vendor.py --fetch    fetch them again through npm and rewrite the table

For a new version change its number below, fetch, and read the diff.
"""

import argparse
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VENDOR = Path(__file__).parent / "_static" / "vendor"
TABLE = VENDOR / "VERSIONS.md"

# (npm package, version, licence, {file under vendor/: file in the package})
PACKAGES = [
    (
        "mathjax",
        "3.2.2",
        "Apache-2.0",
        {"mathjax/tex-svg.js": "es5/tex-svg.js", "mathjax/LICENSE": "LICENSE"},
    ),
    (
        "@jupyter-widgets/html-manager",
        "1.0.15",
        "BSD-3-Clause",
        {
            "html-manager/embed.js": "dist/embed.js",
            "html-manager/embed.js.LICENSE.txt": "dist/embed.js.LICENSE.txt",
            # Font Awesome, solid and regular: the faces that the controls' icons use.
            # The other formats of these faces are for browsers without WOFF2.
            **{
                f"html-manager/{face}.woff2": f"dist/{face}.woff2"
                for face in ("1551f4f60c37af51121f", "7a3337626410ca2f4071")
            },
        },
    ),
    (
        "@jupyter-widgets/base",
        "6.0.11",
        "BSD-3-Clause",
        {"html-manager/LICENSE": "LICENSE"},
    ),
    (
        "@fortawesome/fontawesome-free",
        "5.15.4",
        "OFL-1.1 (fonts), CC-BY-4.0 (icons)",
        {"html-manager/FONTAWESOME-LICENSE.txt": "LICENSE.txt"},
    ),
]
_HEAD = """# Vendored browser files

Third-party files, unchanged, each under its own licence (stored beside it). They are
fetched, and this table is written, by `python book/vendor.py --fetch`.

| file | package | version | licence | sha256 |
| --- | --- | --- | --- | --- |
"""


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def recorded() -> dict[str, str]:
    """Checksums as VERSIONS.md states them: file under vendor/ -> sha256."""
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in TABLE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    return {row[0]: row[-1] for row in rows}


def problems() -> list[str]:
    """What differs from the table: altered, missing and unlisted files."""
    table = recorded()
    here = {
        path.relative_to(VENDOR).as_posix()
        for path in VENDOR.rglob("*")
        if path.is_file() and path != TABLE
    }
    found = [f"{name}: listed, but not there" for name in table.keys() - here]
    found += [f"{name}: there, but not listed" for name in here - table.keys()]
    found += [
        f"{name}: its content differs from the recorded sha256"
        for name in here & table.keys()
        if digest(VENDOR / name) != table[name]
    ]
    return sorted(found)


def fetch() -> None:
    """Fetch every file through npm and write the table."""
    lines = []
    for package, version, licence, files in PACKAGES:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                ["npm", "pack", "--silent", f"{package}@{version}"],
                cwd=folder,
                check=True,
                stdout=subprocess.DEVNULL,
            )
            (archive,) = Path(folder).glob("*.tgz")
            with tarfile.open(archive) as tar:
                for name, inside in files.items():
                    target = VENDOR / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(tar.extractfile(f"package/{inside}").read())
                    lines.append(
                        f"| `{name}` | {package} | {version} | {licence} "
                        f"| `{digest(target)}` |"
                    )
    TABLE.write_text(_HEAD + "\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fetch", action="store_true", help="fetch through npm")
    if parser.parse_args().fetch:
        fetch()
    found = problems()
    print("\n".join(found) or f"{len(recorded())} vendored files are as recorded")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
