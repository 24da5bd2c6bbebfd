"""The flags of each command, and what it runs. The table `server.cli.commands` has their names and help texts.

The imports of a command are inside its functions, because each costs time that the other commands do not have to spend;
those of `serve` and of errors in its settings must stay fast, and PyTorch takes seconds.
"""
