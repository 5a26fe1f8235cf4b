"""`python -m cubatch`: the command line."""

from cubatch.cli.app import main

if __name__ == "__main__":
    main()
