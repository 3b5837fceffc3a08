"""Runs the command line: `python -m capsnet`, also under torchrun."""

from capsnet.cli import main

if __name__ == "__main__":
    main()
