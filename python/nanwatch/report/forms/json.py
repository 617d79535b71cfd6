"""JSON, which `read_saved` reads back."""

from __future__ import annotations

from . import Form

FORM = Form("json", "json", lambda report, tell: report.to_json())
