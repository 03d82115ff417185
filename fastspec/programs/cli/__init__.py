"""The command line: `app.py` gathers the commands."""
