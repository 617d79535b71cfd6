"""A format for each linear layer of a model: tried by emulation, measured, and searched for."""
