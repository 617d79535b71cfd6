"""Private names of PyTorch that nanwatch uses: one list, all seen in torch 2.13.0, which may only get shorter."""

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import nanwatch

# At most 25. A name goes from here with its last use.
LISTED = """
torch._C.DisableTorchFunction torch._C.DispatchKey.CPU torch._C.DispatchKeySet
torch._C._autograd._get_sequence_nr torch._C._autograd._unsafe_set_version_counter
torch._C._current_autograd_node torch._C._current_graph_task_id
torch._C._dynamo.eval_frame._debug_get_cache_entry_list
torch._C._dynamo.eval_frame.get_eval_frame_callback torch._C._functorch.is_functorch_wrapped_tensor
torch._C._functorch.peek_interpreter_stack torch._C._get_tracing_state torch._C._set_tracing_state
torch._compile._disable_dynamo torch._dynamo.convert_frame.input_codes
torch._dynamo.eval_frame.skip_code torch._dynamo.source.AttrSource
torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable
torch.autograd.Variable._execution_engine.queue_callback
torch.nn.Module._call_impl.__code__ torch.nn.Module._compiled_call_impl torch.nn.Module._wrapped_call_impl.__code__
torch.utils._python_dispatch.TorchDispatchMode torch.utils._python_dispatch._disable_current_modes torch.utils._pytree
"""


def used() -> set[str]:
    """Return the dotted names with a private part that nanwatch's modules import from torch or read from it."""
    nodes = [
        x
        for path in Path(nanwatch.__file__).parent.rglob("*.py")
        for x in ast.walk(ast.parse(path.read_text()))
    ]
    imports = [x for x in nodes if isinstance(x, ast.ImportFrom) and (x.module or "").startswith("torch")]
    names = {f"{x.module}.{name.name}" for x in imports for name in x.names}
    names |= {re.sub(r"^nn\.", "torch.nn.", ast.unparse(x)) for x in nodes if isinstance(x, ast.Attribute)}
    private = {x for x in names if re.fullmatch(r"torch(\.\w+)*\._[A-Za-z]\w*(\.\w+)*", x)}
    return {x for x in private if not any(longer.startswith(f"{x}.") for longer in private)}


def resolved(name: str) -> Any:
    """Return the object of this dotted name."""
    head, _, last = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ImportError:
        return getattr(resolved(head), last)


def test_private_names_of_torch_are_listed() -> None:
    """Just the list is used, and each name of it is in the PyTorch that is installed."""
    assert used() == set(LISTED.split())
    for name in LISTED.split():
        resolved(name)
