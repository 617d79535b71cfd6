"""Commands of nanwatch, run in this process."""

import pytest

from nanwatch import __main__ as command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = command.main(list(arguments))
    shown = capsys.readouterr()
    return status, shown.out, shown.err
