"""Spikes: a loss or a gradient norm that jumps, and the tensor that left its history first."""
