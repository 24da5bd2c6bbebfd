"""The command line: settings, commands and their wiring."""
