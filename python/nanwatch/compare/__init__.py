"""Two executions compared: models, traces or runs of a script. `trace.diff` compares two traces by record."""
