"""Opening a model with one of the caches that are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from h2o_gguf.errors import OptionError
from h2o_gguf.evaluation.variants import AUTO, Variant
from h2o_gguf.models import read_shape, require_support
from h2o_gguf.policies import Policy

if TYPE_CHECKING:
    from h2o_gguf.llama import H2OLlama

__all__ = ["WRITTEN", "ModelFile", "check_lengths"]

BLOCK = 64  # entries evicted at once while writing
WRITTEN = 64  # most tokens that are written to a text that fills the length


@dataclass(frozen=True)
class ModelFile:
    """A model and how it is run.  n_threads : 0: physical cores."""

    path: str
    n_threads: int = 0
    n_gpu_layers: int = 0

    def open(self, variant: Variant, policy: Policy, n_batch: int) -> H2OLlama:
        """The model with a variant's cache, read n_batch tokens at a time.  policy : which that variant made.

        Raises: what H2OLlama raises.
        """
        from h2o_gguf.llama import H2OLlama

        return H2OLlama(
            self.path, policy=policy, n_batch=n_batch, kv_block=min(BLOCK, n_batch), n_threads=self.n_threads,
            n_gpu_layers=self.n_gpu_layers, type_k=variant.type_k, type_v=variant.type_v,
            attic="ram" if variant.attic else "off", 
            recall_every=None if variant.recall_every == AUTO else variant.recall_every,
        )  # fmt: skip


def check_lengths(path: str, lengths: tuple[int, ...], n_batch: int) -> None:
    """Raise OptionError if the full cache of the longest, and a batch, do not fit the model's positions;
    UnsupportedModelError, ModelFileError.
    """
    n_pos_max = require_support(read_shape(path)).n_pos_max
    n_most = n_pos_max - n_batch - WRITTEN
    if n_most < 1:
        raise OptionError(
            f"a batch of {n_batch} tokens and {WRITTEN} to write do not fit into the model's {n_pos_max} "
            f"positions: take batches of {max(1, n_pos_max // 4)} or less",
            "n_batch",
        )
    if lengths and max(lengths) > n_most:
        raise OptionError(
            f"a length of {max(lengths)} tokens, a batch of {n_batch} and {WRITTEN} to write do not fit "
            "into the model's positions, and the full cache must hold them to compare with: "
            f"the longest is {n_most}",
            "length",
        )
