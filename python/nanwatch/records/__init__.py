"""Records: one for each tensor, a frame for each call, and the headroom of both. No torch."""
