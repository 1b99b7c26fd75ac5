"""Which policy at which budget to trust: measured on the user's own model, without a download."""

from h2o_gguf.evaluation.fidelity import (
    Fidelity,
    FullCache,
    bootstrap_ratio,
    measure_fidelity,
    read_full,
    rows,
)

__all__ = ["Fidelity", "FullCache", "bootstrap_ratio", "measure_fidelity", "read_full", "rows"]
