"""Histories of magnitudes over many batches: forecasts of overflow, spikes of the loss, suspect weights."""
