"""Forms of a report: each module of this folder defines one as `FORM`, and is found by being here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple, TypeAlias

from ...util.progress import Tell
from ..report import Report
from ..spike import SpikeReport

AnyReport: TypeAlias = Report | SpikeReport


class Form(NamedTuple):
    """Form of a report: the name that `nanwatch show --format` takes, the suffix of its file, and the report in it.

    `output_dir` gets the forms that are `in_folder`.
    """

    name: str
    suffix: str
    render: Callable[[AnyReport, Tell], str]
    in_folder: bool = True


@cache
def forms() -> dict[str, Form]:
    """Return the forms by their names."""
    modules = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
    return {module.FORM.name: module.FORM for module in modules}


def folder_forms() -> list[Form]:
    """Return the forms that are written for each failure."""
    return [form for form in forms().values() if form.in_folder]
