"""Failing models rebuilt from public reports, each with the one line that cured it; see table.Cure."""
