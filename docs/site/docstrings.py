"""Docstrings for the site: a section `Example:` holds examples that are run, and is shown as such."""

from typing import Any

from griffe import Extension, Object


class ShownExamples(Extension):
    """Griffe knows the section by its plural; by its singular it is a remark in prose."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("Example:\n", "Examples:\n")
