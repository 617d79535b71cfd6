"""`--debug underflow_overflow` on the command line of a script that trains with transformers' Trainer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nanwatch.integrations.trainer_debug import SWITCH
from support.processes import environment

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

COMMAND_LINE = """
import sys
if {imported}: import nanwatch
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
    def forward(self, x, labels):
        y = self.down(self.up(x))
        return {{"loss": (y.float() - labels[:, None]).abs().mean(), "logits": y}}
rows = [{{"x": torch.ones(4, dtype=torch.float16), "labels": 3.0}} for _ in range(4)]
trainer = Trainer(Net().half(), args, train_dataset=rows)
try:
    trainer.train()
except ValueError as error:
    finding = getattr(getattr(error, "report", None), "finding", None)
    print(type(error).__name__, getattr(finding, "operation", None), file=sys.stderr)
"""
ARGUMENTS = """
--debug underflow_overflow --use_cpu true --report_to none --disable_tqdm true --dataloader_pin_memory false
--max_steps 9 --save_strategy no --logging_strategy no --optim sgd --learning_rate 3000 --max_grad_norm 0
--lr_scheduler_type constant --output_dir
"""


@pytest.mark.slow
def test_the_command_line_of_a_script(tmp_path: Path) -> None:
    """`--debug underflow_overflow` through HfArgumentParser, with NANWATCH_TRANSFORMERS=1 or without nanwatch: the same
    stdout, byte for byte, and nanwatch has written it: its error has the operation.
    """
    said = {}
    for imported in (False, True):
        script = tmp_path / f"train_{imported}.py"
        script.write_text(COMMAND_LINE.format(imported=imported))
        done = subprocess.run(
            [sys.executable, str(script), *ARGUMENTS.split(), str(tmp_path)],
            env=environment(OMP_NUM_THREADS="1", **{SWITCH: "1"}), capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said[imported] = done.stdout
        assert ("NonFiniteError aten." in done.stderr) == imported, done.stderr
    assert said[True] == said[False]
    assert "Detected inf/nan during batch_number=" in said[True]
