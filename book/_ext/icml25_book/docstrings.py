"""Docstrings hold ``$`` mathematics, as the notebooks do; Sphinx reads roles."""

import re

from sphinx.application import Sphinx


def typeset(text: str) -> str:
    """``$$...$$`` on its own lines becomes a display, ``$...$`` inline math."""

    def display(match: re.Match) -> str:
        indent, formula = match[1], " ".join(match[2].split())
        return f"\n{indent}.. math::\n\n{indent}   {formula}{match[3]}\n"

    def inline(match: re.Match) -> str:
        # A role has to be followed by a space or punctuation: "$m$-ary", "$k$th".
        return f":math:`{' '.join(match[1].split())}`" + ("\\ " if match[2] else "")

    text = re.sub(r"(?ms)^([ ]*)\$\$(.+?)\$\$([.,;]?)[ ]*$", display, text)
    text = re.sub(r"(?s)\$\$(.+?)\$\$(?=(\w)?)", inline, text)
    return re.sub(r"(?s)(?<!\\)\$([^$]+?)(?<!\\)\$(?=(\w)?)", inline, text)


def process(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Sphinx's hook: change a docstring in place, before napoleon reads it."""
    lines[:] = typeset("\n".join(lines)).split("\n")
