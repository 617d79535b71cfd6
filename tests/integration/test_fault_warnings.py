"""The warning of a non-finite forward during an import."""

from __future__ import annotations

from nanwatch.integrations.trainer_debug import SWITCH
from support.processes import environment, forked


def test_a_warning_of_an_import_is_at_the_import() -> None:
    """Past the frames of importlib."""
    done = forked("-c", "\nimport nanwatch", env=environment(**{SWITCH: "perhaps"}), imported=False)
    assert done.stderr.startswith(f"<string>:2: RuntimeWarning: {SWITCH}='perhaps' is not understood"), (
        done.stderr
    )
