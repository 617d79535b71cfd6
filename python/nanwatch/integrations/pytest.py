"""`pytest --nanwatch`: watches the models that each test calls. python/pytest_nanwatch.py has its flags."""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ..report import text
from ..report.report import NonFiniteError, Report
from ..session.api import make_options, start_watch
from ..session.kinds import Trace
from ..session.model_finder import ModelFinder
from ..session.watch import Watch, watch_starts
from ..trace.comparison import diff
from ..trace.trace_file import TraceError, arrow

# A test that expects a ValueError must not be content with a NonFiniteError.
_OPTIONS: dict[str, Any] = {"on_nonfinite": "record", "rerun": True, "forecast": False}


class WatchedModels:
    """Watches of the models that one test calls from outside any other module.

    A model that the test watches itself is left alone.
    """

    def __init__(self, options: dict[str, Any], **settings: bool) -> None:
        self._options = make_options({**_OPTIONS, **options}, **settings)
        self._watches: list[tuple[Watch, set[int]]] = []
        self._is_starting = False
        self.traces: list[Path] = []
        self.reports: list[Report] = []
        self.refusals: list[str] = []
        self.num_watched = 0

    @contextmanager
    def watched(self, folder: str | None) -> Iterator[None]:
        """Watch each model that is called meanwhile, with a trace in the folder, if any."""
        finder = ModelFinder(lambda model: self._start(model, folder), accepts=lambda _: True)
        starts = watch_starts.add(self._watch_started)
        try:
            with finder:
                yield
        finally:
            starts.remove()
            for watch, _ in self._watches:
                self._end(watch)

    def _start(self, model: nn.Module, folder: str | None) -> None:
        options = self._options
        if folder is not None:
            trace = options.trace or Trace(folder)
            options = replace(options, trace=replace(trace, path=Path(folder, f"{self.num_watched}.parquet")))
        self._is_starting = True
        try:
            parts = {id(module) for module in model.modules()}
            self._watches.append((start_watch(model, options, must_match=False), parts))
            self.num_watched += 1
        except (TypeError, ValueError) as error:  # a ScriptModule, or a pattern for another model
            self.refusals.append(f"{type(model).__name__}: {error}")
        finally:
            self._is_starting = False

    def _watch_started(self, _: Watch, model: nn.Module) -> None:
        if self._is_starting:
            return
        parts = {id(module) for module in model.modules()}
        for pair in [pair for pair in self._watches if parts & pair[1]]:
            self._watches.remove(pair)
            self._end(pair[0])

    def _end(self, watch: Watch) -> None:
        # A warning that becomes an exception by the test's own filter would hide the test's result.
        with warnings.catch_warnings(), suppress(NonFiniteError):
            warnings.simplefilter("ignore")
            watch.stop()
        report = watch.report()
        if report.finding is not None:
            self.reports.append(report)
        if watch.trace_path is not None:
            self.traces.append(watch.trace_path)


class Plugin:
    """Hooks of `pytest --nanwatch`."""

    def __init__(self, baseline: str | None, *, is_update: bool) -> None:
        if baseline is not None:
            try:
                arrow("pyarrow.parquet", "--nanwatch-baseline")
            except ImportError as error:
                raise pytest.UsageError(str(error)) from None
        self._baseline = None if baseline is None else Path(baseline).absolute()
        self._is_update = is_update

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Watch while the test runs. Fail it by what was not finite, or differs from the baseline."""
        models = _models_of(item)
        with tempfile.TemporaryDirectory(prefix="nanwatch-") as folder:
            try:
                with models.watched(None if self._baseline is None else folder):
                    result = yield
            except BaseException:
                if models.reports:  # it may be why the test failed
                    item.add_report_section("call", "nanwatch", _words(models.reports))
                raise
            if models.reports:
                pytest.fail(_words(models.reports), pytrace=False)
            if models.refusals and not models.num_watched:
                pytest.fail(f"nanwatch watches no model: {'; '.join(models.refusals)}", pytrace=False)
            if self._baseline is not None and (words := self._compared(self._baseline, item, models.traces)):
                pytest.fail(words, pytrace=False)
        return result

    def _compared(self, baseline: Path, item: pytest.Item, traces: list[Path]) -> str:
        """Return what differs from the baseline of the test, "" for nothing; write what it lacks."""
        for i, trace in enumerate(traces):
            stored = baseline / f"{_file_name(item.nodeid)}-{i}.parquet"
            if self._is_update or not stored.exists():
                baseline.mkdir(parents=True, exist_ok=True)
                shutil.move(trace, stored)
                continue
            try:
                difference = diff(stored, trace)
            except (TraceError, ValueError) as error:
                return f"the baseline {stored} is of other calls: {error}; --nanwatch-update writes it anew"
            if not difference.equal:
                return f"differs from its baseline\n\n{difference.to_text()}"
        return ""


def _models_of(item: pytest.Item) -> WatchedModels:
    """Return what watches the models of a test, with the options of its marks."""
    marks = list(item.iter_markers("nanwatch"))[::-1]  # that of the test goes before that of its class
    try:
        options = {name: value for mark in marks for name, value in mark.kwargs.items()}
        is_left_alone = bool(marks) and False in marks[-1].args
        return WatchedModels(options, **({"enabled": False} if is_left_alone else {}))
    except (TypeError, ValueError, ImportError) as error:
        message = f"options of nanwatch: {error}"
    pytest.fail(message, pytrace=False)


def _words(reports: list[Report]) -> str:
    """Return the report of the first model that had one, and a line for each of the others."""
    heads = [text.summary(report.finding) for report in reports if report.finding is not None]
    others = [f"In another model: {head}." for head in heads[1:]]
    return "\n".join([heads[0], "", reports[0].to_text(), *others])


def _file_name(nodeid: str) -> str:
    """Return a name that differs from those of other tests, on a disk that folds cases too."""
    mark = hashlib.sha256(nodeid.encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', nodeid)[-120:]}-{mark}"
