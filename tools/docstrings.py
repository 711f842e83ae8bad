"""Docstrings as Markdown: doctests become code blocks, and Sphinx's roles plain code. Used by
mkdocs.yml."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?:^[ \t]*>>> .*\n?(?:^[ \t]*(?!>>>)\S.*\n?)*)+", re.M)


def as_markdown(text: str) -> str:
    """See ``tests/project/test_site.py`` for what becomes of what."""
    text = re.sub(r":(?:class|func|meth|data|mod):`~?([^`]+)`", r"`\1`", text)
    return DOCTEST.sub(lambda block: f"```pycon\n{block[0].rstrip()}\n```\n", text)


class DocstringsAsMarkdown(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
