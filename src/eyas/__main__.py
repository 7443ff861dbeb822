"""`python -m eyas`, and under torchrun `-m eyas`: the command line."""

from eyas.cli import app

if __name__ == "__main__":
    app()
