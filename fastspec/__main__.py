"""`python -m fastspec`: the command line, also where the script `fastspec` is not on the path."""

from fastspec.programs.cli.app import app

if __name__ == "__main__":
    app(prog_name="fastspec")
