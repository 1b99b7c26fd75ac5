"""Speed beside llama.cpp's own, measured in one interleaved run."""
