"""`python -m h2o_gguf` is `h2o-gguf`."""

from __future__ import annotations

from h2o_gguf.cli.__main__ import main

if __name__ == "__main__":
    main()
