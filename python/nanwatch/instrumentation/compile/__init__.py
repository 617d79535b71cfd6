"""How torch.compile sees that a module is watched: Dynamo, the operators in graphs, CUDA graphs."""
