"""Display in a notebook: the page of a result in a frame, its text where there is none."""

from __future__ import annotations

from html import escape
from typing import Any

_STYLE = "width: 100%; height: 36em; border: 0"


class InNotebook:
    """Base of results that a notebook shows as their page, and a console as their text."""

    __slots__ = ()

    def to_text(self) -> str:
        """Return the result for people."""
        raise NotImplementedError

    def to_html(self) -> str:
        """Return the result as one page."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own: its style does not reach the notebook."""
        try:
            page = self.to_html()
        except ImportError:  # no jinja2
            return f"<pre>{escape(self.to_text())}</pre>"
        frame = f'sandbox="" title="nanwatch" style="{_STYLE}"'
        return f'<iframe {frame} srcdoc="{escape(page)}"></iframe>'

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Return both forms: IPython would take the `repr` of a dataclass for the text."""
        return {"text/plain": self.to_text(), "text/html": self._repr_html_()}
