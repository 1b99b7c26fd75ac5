"""`python -m h2o_gguf.cli` is `h2o-gguf`."""

from h2o_gguf.cli.app import main

if __name__ == "__main__":
    main()
