"""Trainings that are wrong without an error, each with its healthy twin, and healthy ones of unusual shape."""
