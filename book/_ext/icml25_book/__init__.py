"""The book's own Sphinx extension.

It draws what must not be typed by hand, from the ledger, the notebooks' stored
outputs, the recorded runs and the library, each time the book is built. It also gives
every cell that checks a claim an anchor, so that the scorecard can point at the
evidence. `directives.py` holds the directives, `sources.py` what they read,
`docstrings.py` the mathematics of the reference, `glossary.py` the symbols and terms.
"""

import base64
import io
import json
import re
from pathlib import Path

from docutils import nodes
from icml25.core import claims
from PIL import Image
from sphinx.application import Sphinx
from sphinx.config import Config

from icml25_book import directives, docstrings, glossary, sources

_CARD_SIZE = (720, 480)


def _launch_only_from_an_address(app: Sphinx, config: Config) -> None:
    """Without the repository's public address a launch button leads nowhere."""
    if not config.html_theme_options.get("repository_url"):
        config.html_theme_options["launch_buttons"] = {}


def _drop_claim_data(app: Sphinx, docname: str, source: list[str]) -> None:
    """Hide the claims' data from MyST-NB, which warns about types it cannot draw."""
    if not docname.startswith("notebooks/"):
        return
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(claims.MIME, None)
    source[0] = json.dumps(notebook)


def _anchor_claims(app: Sphinx, doctree: nodes.document) -> None:
    path = Path(app.env.doc2path(app.env.docname))
    if path.suffix != ".ipynb":
        return
    ids: dict[int, list[str]] = {}
    for verdict in claims.stored_verdicts(path):
        ids.setdefault(verdict["cell"], []).append(f"claim-{verdict['id']}")
    for node in doctree.findall(nodes.container):
        if node.get("nb_element") == "cell_code":
            node["ids"].extend(ids.get(node["cell_index"], []))


def _keep_punctuation(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Keep a formula and the mark after it on one line, which a browser would part."""
    for math in list(doctree.findall(nodes.math)):
        text = math.next_node(descend=False, siblings=True)
        mark = re.match(r"[.,;:!?)]+", text) if isinstance(text, nodes.Text) else None
        if mark and math.parent is text.parent:
            joined = nodes.inline("", "", classes=["icml25-joined"])
            math.parent.replace(text, nodes.Text(text[mark.end() :]))
            math.parent.replace(math, joined)
            joined += [math, nodes.Text(mark[0])]


def _choose_scripts(
    app: Sphinx, page: str, template: str, context: dict, doctree
) -> None:
    """Add the scorecard's filter; drop Thebe, which needs the network."""
    if "icml25-ledger" in context.get("body", ""):
        app.add_js_file("scorecard.js", defer="defer")
    context["script_files"] = [
        script for script in context["script_files"] if not _is_thebe(script)
    ]


def _is_thebe(script) -> bool:
    body = getattr(script, "attributes", {}).get("body") or ""
    return "sphinx-thebe" in str(script.filename) or "THEBE_JS_URL" in body


def _write_card_figures(app: Sphinx, exception: Exception | None) -> None:
    if exception or app.builder.format != "html":
        return
    folder = Path(app.outdir) / "_images" / "cards"
    for chapter in sources.chapters(app.env):
        if encoded := chapter.card_png:
            folder.mkdir(parents=True, exist_ok=True)
            image = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")
            image.thumbnail(_CARD_SIZE, Image.Resampling.LANCZOS)
            image.save(folder / f"{chapter.slug}.png", optimize=True)


def setup(app: Sphinx) -> dict[str, bool | str]:
    for name, directive in directives.DIRECTIVES.items():
        app.add_directive(name, directive)
    app.add_directive("notation-tables", glossary.NotationTables)
    app.connect("config-inited", _launch_only_from_an_address)
    app.connect("autodoc-process-docstring", docstrings.process, priority=400)
    app.connect("source-read", _drop_claim_data)
    app.connect("doctree-read", _anchor_claims)
    app.connect("doctree-resolved", glossary.link_terms)
    app.connect("doctree-resolved", _keep_punctuation)
    # After the extensions that add the scripts.
    app.connect("html-page-context", _choose_scripts, priority=900)
    app.connect("build-finished", _write_card_figures)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
