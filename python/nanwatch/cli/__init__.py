"""The commands of `nanwatch`; the table of all is `commands.COMMANDS`.

A command reads arguments, calls a room below and prints. Nothing else imports this room.
"""
