"""Ways by which the calls of a model reach a recorder: wrappers, global hooks, module names.

`compile` does the same inside torch.compile. Nothing here reads the values of tensors.
"""
