"""Private names of PyTorch that nanwatch uses, by the latest version of PyTorch in which each was seen.

PyTorch may drop a private name without notice. `tests/unit/util/test_torch_private.py` looks for each name in the
installed version, and fails for a name that the package uses and this list lacks. `nanwatch doctor` looks for them
under a version that is newer than the list. The attributes that `nn.Module` keeps in each module are not listed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

SEEN = {
    # Older versions have these in place of others, and the code asks which is there.
    "2.8": ("torch.distributed.pipelining.stage.PipelineStage._shape_inference",),
    "2.13": (
        # Tensors, storages, operators.
        "torch.Tensor._backward_hooks",
        "torch.Tensor._base",
        "torch.Tensor._cdata",
        "torch.Tensor._is_zerotensor",
        "torch.Tensor._version",
        "torch.UntypedStorage._cdata",
        "torch._C.DisableTorchFunction",
        "torch._C._WeakTensorRef",
        "torch._C._disabled_torch_dispatch_impl",
        "torch._C._dispatch_has_kernel_for_dispatch_key",
        "torch._C._get_privateuse1_backend_name",
        "torch._debug_has_internal_overlap",
        "torch._foreach_copy_",
        "torch._foreach_norm",
        "torch._has_compatible_shallow_copy_type",
        "torch._is_functional_tensor",
        "torch._ops.OpOverload",
        "torch._ops.OpOverload._schema",
        "torch._C._autograd._unsafe_set_version_counter",
        "torch.autograd.grad_mode._unsafe_preserve_version_counter",
        "torch.utils._pytree.SUPPORTED_NODES",
        "torch.utils._pytree.tree_map",
        "torch.utils._pytree.tree_map_only",
        "torch.utils.data.dataloader._BaseDataLoaderIter.__next__",
        # Modes, transforms, tracing.
        "torch._C._functorch.is_functorch_wrapped_tensor",
        "torch._C._functorch.peek_interpreter_stack",
        "torch._C._get_tracing_state",
        "torch._C._len_torch_dispatch_stack",
        "torch._C._set_tracing_state",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._python_dispatch._disable_current_modes",
        # Autograd.
        "torch._C._FunctionBase._sequence_nr",
        "torch._C._autograd._get_sequence_nr",
        "torch._C._current_autograd_node",
        "torch._C._current_graph_task_id",
        "torch.amp.GradScaler._enabled",
        "torch.amp.GradScaler._per_optimizer_states",
        "torch.amp.GradScaler._scale",
        "torch.autograd.Variable._execution_engine",
        "torch.nn.utils.clip_grad._clip_grads_with_norm_",
        "torch.autograd.graph._engine_run_backward",
        # Modules.
        "torch.nn.Module._call_impl",
        "torch.nn.Module._compiled_call_impl",
        "torch.nn.Module._wrapped_call_impl",
        "torch.nn.modules.batchnorm._NormBase",
        "torch.nn.modules.loss._Loss",
        "torch.nn.utils.parametrize._cache",
        "torch.nn.utils.parametrize._cache_enabled",
        # torch.compile.
        "torch._C._dynamo.eval_frame._debug_get_cache_entry_list",
        "torch._C._dynamo.eval_frame.set_eval_frame",
        "torch._C._dynamo.guards.RootGuardManager.add_lambda_guard",
        "torch._compile._disable_dynamo",
        "torch._dynamo.config.patch",
        "torch._dynamo.convert_frame.input_codes",
        "torch._dynamo.eval_frame.OptimizedModule._orig_mod",
        "torch._dynamo.eval_frame.skip_code",
        "torch._dynamo.exc.TorchDynamoException",
        "torch._dynamo.graph_break",
        "torch._dynamo.guards.GuardBuilder.CONSTANT_MATCH",
        "torch._dynamo.guards.install_guard",
        "torch._dynamo.reset",
        "torch._dynamo.source.AttrSource",
        "torch._dynamo.variables.ConstantVariable.create",
        "torch._dynamo.variables.DeletedVariable",
        "torch._dynamo.variables.ListVariable",
        "torch._dynamo.variables.TensorVariable",
        "torch._dynamo.variables.UserDefinedObjectVariable",
        "torch._dynamo.variables.base.AttributeMutationNew",
        "torch._dynamo.variables.base.VariableTracker.build",
        "torch._dynamo.variables.lazy.LazyVariableTracker",
        "torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable.call_function",
        "torch._inductor.config.patch",
        # Several ranks.
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper",
        "torch.distributed.distributed_c10d._get_default_store",
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group",
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups",
        "torch.distributed.pipelining.stage.PipelineStage._backward_metadata_inference",
        "torch.distributed.pipelining.stage.PipelineStage._forward_metadata_inference",
    ),
}
LATEST = list(SEEN)[-1]


def missing() -> list[str]:
    """Return the names of the latest version in the list that the installed PyTorch lacks. Imports their modules."""
    return [name for name in SEEN[LATEST] if not _is_there(name)]


def newer() -> bool:
    """Return whether the installed PyTorch is newer than the list."""
    installed, latest = (version.split(".")[:2] for version in (str(torch.__version__), LATEST))
    return list(map(int, installed)) > list(map(int, latest))


def _is_there(name: str) -> bool:
    found: Any = torch
    place = "torch"
    for part in name.split(".")[1:]:
        place += f".{part}"
        try:
            found = getattr(found, part) if hasattr(found, part) else import_module(place)
        except ImportError:
            # An attribute that only instances have, which the class sets when it makes one.
            maker = getattr(getattr(found, "__init__", None), "__code__", None)
            return maker is not None and part in maker.co_names
    return True
