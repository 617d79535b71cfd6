"""`watch()`: its options, the Watch, and what it does at a failure, before a step and at the end."""
