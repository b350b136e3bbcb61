"""Formulas as MathML, made when the site is built: no script, no font, no network in the page."""

from docutils import nodes
from latex2mathml.converter import convert


def setup(app) -> None:
    app.add_html_math_renderer("mathml", (inline, None), (block, None))


def inline(self, node: nodes.math) -> None:
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block(self, node: nodes.math_block) -> None:
    """A formula on a line of its own, with its number where it has one."""
    number = f'<span class="eqno">({node["number"]})</span>' if node["number"] else ""
    for name in node["ids"]:
        self.body.append(f'<span id="{name}"></span>')
    self.body.append(f'<div class="math">{convert(node.astext(), display="block")}{number}</div>')
    raise nodes.SkipNode
