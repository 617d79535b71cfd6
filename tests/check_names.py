"""Check that the tests of python/nanwatch/x/y.py are found by name; imports neither torch nor nanwatch.

    python tests/check_names.py

They lie in tests/unit/x/test_y.py, and those of a topic in test_y_topic.py. ELSEWHERE lists the modules without a file
of their own, by the test that runs them.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parent
UNIT = TESTS / "unit"
PACKAGE = TESTS.parent / "python" / "nanwatch"

ELSEWHERE: dict[str, tuple[str, ...]] = {
    # A command is run as a process.
    "integration/test_commands.py": ("cli/commands", "cli/options", "cli/files"),
    "integration/test_command_replay.py": ("cli/replay", "session/replay"),
    "integration/test_command_run.py": ("cli/run", "cli/script"),
    "integration/test_command_top.py": ("cli/top",),
    "integration/test_command_twice.py": ("cli/equivalence",),
    "integration/test_doctor.py": ("cli/doctor",),
    "distributed/test_netcheck.py": ("netcheck/command",),
    # Other packages are needed.
    "thirdparty/test_debug_oracle.py": ("integrations/debug",),
    "thirdparty/test_log_mlflow.py": ("monitoring/mlflow",),
    "thirdparty/test_log_opentelemetry.py": ("monitoring/opentelemetry",),
    "thirdparty/test_log_prometheus.py": ("monitoring/prometheus",),
    "thirdparty/test_lightning.py": ("integrations/lightning",),
    "thirdparty/test_transformers_trainer.py": ("integrations/transformers", "integrations/trainer_debug"),
    "thirdparty/test_serving.py": ("integrations/serving",),
    "thirdparty/test_sglang.py": ("integrations/sglang",),
    "thirdparty/test_vllm.py": ("integrations/vllm",),
    "compile/test_compile.py": ("instrumentation/compile/dynamo", "instrumentation/compile/operators"),
    "slow/test_notebook.py": ("integrations/notebook",),
    # Parts of what is tested as a whole.
    "integration/test_architecture.py": ("recording/events", "session/dispatch"),
    "integration/test_diff.py": ("trace/comparison", "trace/difference"),
    "integration/test_failures.py": (
        "diagnosis/kept_values",
        "diagnosis/outside",
        "diagnosis/program_code",
        "diagnosis/program_state",
        "diagnosis/reachable",
    ),
    "integration/test_own_memory.py": ("diagnosis/child_process", "diagnosis/own_memory"),
    "integration/test_pytest_plugin.py": ("integrations/pytest",),
    "integration/test_progress.py": ("util/progress",),
    "integration/test_spike_trainings.py": ("monitoring/spikes/steps",),
    "integration/test_watch.py": ("session/api", "util/modules"),
    "integration/test_wrapped_names.py": ("instrumentation/wrapped_names",),
    "unit/capsule/test_capsule.py": ("capsule/files",),
    "unit/capsule/test_replay.py": ("instrumentation/execution_context",),
    "unit/diagnosis/patching/test_patches.py": (
        "diagnosis/patching/effects",
        "diagnosis/patching/matching",
        "diagnosis/patching/meanings",
        "diagnosis/patching/module_options",
        "diagnosis/patching/terms",
        "diagnosis/patching/written",
    ),
    "unit/diagnosis/patching/test_forms.py": ("diagnosis/patching/form_text",),
    "unit/diagnosis/patching/test_rules.py": ("diagnosis/patching/site",),
    "unit/diagnosis/test_cures.py": ("diagnosis/experiment",),
    "unit/diagnosis/test_forward_rerun_repeat.py": ("diagnosis/in_process",),
    "unit/diagnosis/test_loss_statements.py": ("diagnosis/loss_slice",),
    "unit/diagnosis/test_rerun.py": ("diagnosis/folder", "diagnosis/places"),
    "unit/equivalence/test_compare.py": (
        "equivalence/calls",
        "equivalence/differences",
        "equivalence/model_runs",
    ),
    "unit/equivalence/test_matching.py": ("equivalence/engine",),
    "unit/equivalence/test_state.py": ("equivalence/recording",),
    "unit/equivalence/test_twice.py": ("equivalence/operations",),
    "unit/monitoring/test_log_sinks.py": ("monitoring/monitor",),
    "unit/numerics/test_exponents.py": ("numerics/_spread",),
    "unit/numerics/test_ranges.py": ("numerics/readable",),
    "unit/report/test_forms.py": (
        "report/annotation",
        "report/forms/github",
        "report/forms/html",
        "report/forms/json",
        "report/forms/sarif",
        "report/forms/text",
    ),
    "unit/report/test_html.py": ("report/page", "util/place"),
    "unit/report/test_report.py": ("records/record", "report/finding", "report/text"),
    "unit/monitoring/test_sinks.py": ("report/skipped_step",),
    "unit/session/test_failure_handler.py": ("session/reports",),
}
# The words of a shard: records/record.py writes them, report/ shows them.
OTHER_NAMES = {"unit/report/test_placement.py"}


def modules() -> set[str]:
    """Return the modules and packages inside rooms, such as "trace/align"."""
    paths = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    files = {path.with_suffix("").as_posix() for path in paths if len(path.parts) > 1}
    return {name for name in files if not name.endswith(("/__init__", "/__main__"))}


def module_of(test: Path, known: set[str]) -> str | None:
    """Return the module that a test file is named after: the one with the longest name."""
    folder, topic = test.parent.relative_to(UNIT).as_posix(), test.stem.removeprefix("test_")
    words = topic.split("_")
    names = ("_".join(words[:i]) for i in range(len(words), 0, -1))
    candidates = (f"{folder}/{private}{name}" for name in names for private in ("", "_"))
    return next((name for name in candidates if name in known), None)


def faults() -> list[str]:
    """Return a line for each test file without a module, and for each module without a test."""
    known = modules()
    packages = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.glob("*/*/__init__.py")}
    found = []
    tested: set[str] = set()
    for test in sorted(UNIT.rglob("test_*.py")):
        module = module_of(test, known | packages)
        if test.relative_to(TESTS).as_posix() in OTHER_NAMES:
            continue
        if module is None:
            found.append(
                f"{test.relative_to(TESTS)}: no module of this name; call it test_<module>_<topic>.py"
            )
        else:
            tested.add(module)
    elsewhere = {module: test for test, names in ELSEWHERE.items() for module in names}
    for module in sorted(known - tested - set(elsewhere)):
        found.append(f"python/nanwatch/{module}.py: no tests/unit/{'/test_'.join(module.rsplit('/', 1))}.py")
    for module, test in elsewhere.items():
        if module not in known or module in tested:
            found.append(f"ELSEWHERE: {module} is gone, or has tests of its own")
        if not (TESTS / test).exists():
            found.append(f"ELSEWHERE: tests/{test} is gone")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(faults()) or 0)
