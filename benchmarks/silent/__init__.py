"""A benchmark of trainings that are silently wrong: README.md says what it is and how to put a tool to it."""
