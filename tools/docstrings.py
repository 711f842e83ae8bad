"""Converts docstrings to Markdown for the documentation site: doctests become code blocks, and
Sphinx roles such as ``:class:`` become code. Used by mkdocs.yml."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?:^[ \t]*>>> .*\n?(?:^[ \t]*(?!>>>)\S.*\n?)*)+", re.M)


def as_markdown(text: str) -> str:
    """Convert one docstring. ``tests/project/test_site.py`` has an example."""
    text = re.sub(r":(?:class|func|meth|data|mod):`~?([^`]+)`", r"`\1`", text)
    return DOCTEST.sub(lambda block: f"```pycon\n{block[0].rstrip()}\n```\n", text)


class DocstringsAsMarkdown(griffe.Extension):
    """Applies the conversion to every object that griffe reads."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
