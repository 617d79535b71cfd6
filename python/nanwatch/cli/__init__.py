"""The commands of `nanwatch`: run, show, diff, replay, merge, formats, doctor."""
