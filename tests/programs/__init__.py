"""Small programs of ordinary shape, each with the truth about it. `judge.py` compares nanwatch with it."""
