"""Page that opens offline. Needs `jinja2`."""

from __future__ import annotations

from . import Form

FORM = Form("html", "html", lambda report, tell: report.to_html(tell))
