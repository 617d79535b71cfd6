"""The commands of `nanwatch`: run, show, diff, replay, merge, formats, doctor.

A command reads arguments, calls a room below and prints. Nothing else imports this room.
"""
