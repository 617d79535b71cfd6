"""Check that the tests of python/nanwatch/x/y.py are found by name; imports neither torch nor nanwatch.

    python tests/check_names.py

They lie in tests/unit/x/test_y.py, and those of a topic in test_y_topic.py; those that need the package of a trainer or
a tracker in tests/thirdparty/. The modules of a registry share the tests of the registry. ELSEWHERE lists the modules
without a file of their own, by the test that runs them.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parent
UNIT = TESTS / "unit"
PACKAGE = TESTS.parent / "python" / "nanwatch"

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "compile/test_compile.py": (
        "instrumentation/compile/dynamo",
        "instrumentation/compile/operators",
    ),
    "distributed/test_replicas.py": (
        "ranks/replica_bytes",
        "ranks/replica_thread",
    ),
    "integration/test_architecture.py": ("session/dispatch",),
    "programs/test_programs.py": (
        "diagnosis/diagnosis",
        "diagnosis/experiment",
        "diagnosis/loss_slice",
        "diagnosis/operation",
        "diagnosis/patching/effects",
        "diagnosis/patching/form_text",
        "diagnosis/patching/guards",
        "diagnosis/patching/matching",
        "diagnosis/patching/meanings",
        "diagnosis/patching/rules",
        "diagnosis/patching/site",
        "diagnosis/patching/terms",
        "diagnosis/patching/written",
    ),
    "slow/test_notebook.py": ("integrations/notebook",),
    "thirdparty/test_log_tensorboard.py": ("sinks/logs",),
    "unit/blackbox/test_story.py": ("blackbox/text",),
    "unit/capsule/test_capsule.py": ("capsule/values",),
    "unit/checkpoint/test_against.py": ("checkpoint/pairing",),
    "unit/checkpoint/test_formats.py": (
        "checkpoint/inert_pickle",
        "checkpoint/zips",
    ),
    "unit/checkpoint/test_scan.py": (
        "checkpoint/findings",
        "checkpoint/result",
        "checkpoint/stored",
        "cli/scan",
    ),
    "unit/cli/test_formats.py": ("trace/format_advice",),
    "unit/cli/test_replay.py": ("session/replay",),
    "unit/diagnosis/patching/test_patches.py": ("diagnosis/patching/module_options",),
    "unit/ranks/test_merge_golden.py": ("ranks/merge_pages",),
    "unit/ranks/test_replica_store.py": ("report/replica",),
    "unit/ranks/test_step_ranks.py": (
        "audit/rank_steps",
        "recording/step_weight",
    ),
    "unit/equivalence/test_compare.py": (
        "equivalence/calls",
        "equivalence/differences",
        "equivalence/model_runs",
    ),
    "unit/equivalence/test_matching.py": ("equivalence/engine",),
    "unit/equivalence/test_twice.py": (
        "equivalence/operations",
        "equivalence/recording",
        "equivalence/state",
        "equivalence/trials",
    ),
    "unit/instrumentation/test_attention.py": ("instrumentation/call_readers",),
    "unit/history/spikes/test_watch.py": ("history/spikes/steps",),
    "unit/history/test_forecast.py": ("sinks/monitor",),
    "unit/sinks/test_webhook.py": ("sinks/messages",),
    "unit/audit/test_audit.py": (
        "audit/checks",
        "audit/samples",
        "audit/suspicions",
        "audit/taps",
        "audit/window",
        "report/update_finding",
    ),
    "unit/precision/test_precision.py": ("precision/casting",),
    "unit/report/test_report_golden.py": (
        "report/annotation",
        "report/cure_text",
        "report/finding_text",
        "report/page",
        "report/skipped_step",
        "report/suspect",
        "report/text",
    ),
    "unit/session/test_checkpoint_guard.py": ("instrumentation/saving",),
    "unit/session/test_failure_handler.py": ("session/reports",),
    "unit/session/test_optimizer_guard.py": (
        "instrumentation/global_hooks",
        "instrumentation/grad_scaler",
    ),
    "unit/session/test_optimizer_steps.py": ("instrumentation/step_closure",),
    "unit/trace/test_comparison.py": (
        "trace/align",
        "trace/difference",
    ),
}
# Modules that are found by their folder: what each must do is tested for all of them.
REGISTRIES = ("report/forms", "checkpoint/formats")
# Some tests of these rooms need the packages of others, and lie in tests/thirdparty/.
THIRDPARTY = ("integrations", "sinks")
# The words of a shard: records/record.py writes them, report/ shows them.
OTHER_NAMES = {"unit/report/test_placement.py"}


def modules() -> set[str]:
    """Return the modules and packages inside rooms, such as "trace/align"."""
    paths = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    files = {path.with_suffix("").as_posix() for path in paths if len(path.parts) > 1}
    return {name for name in files if not name.endswith(("/__init__", "/__main__"))}


def module_of(test: Path, known: set[str], folder: str) -> str | None:
    """Return the module in a folder that a test file is named after: the one with the longest name."""
    words = test.stem.removeprefix("test_").split("_")
    names = ("_".join(words[:i]) for i in range(len(words), 0, -1))
    candidates = (f"{folder}/{private}{name}" for name in names for private in ("", "_"))
    return next((name for name in candidates if name in known), None)


def faults() -> list[str]:
    """Return a line for each test file without a module, and for each module without a test."""
    known = modules()
    packages = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.glob("*/*/__init__.py")}
    found = []
    tested: set[str] = set()
    for room in THIRDPARTY:
        for test in (TESTS / "thirdparty").glob("test_*.py"):
            tested |= {module for module in [module_of(test, known, room)] if module is not None}
    for test in sorted(UNIT.rglob("test_*.py")):
        module = module_of(test, known | packages, test.parent.relative_to(UNIT).as_posix())
        if test.relative_to(TESTS).as_posix() in OTHER_NAMES:
            continue
        if module is None:
            found.append(
                f"{test.relative_to(TESTS)}: no module of this name; call it test_<module>_<topic>.py"
            )
        else:
            tested.add(module)
    elsewhere = {module: test for test, names in ELSEWHERE.items() for module in names}
    tested |= {module for module in known if module.rpartition("/")[0] in {*REGISTRIES} & tested}
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
