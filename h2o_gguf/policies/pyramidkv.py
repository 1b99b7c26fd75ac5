"""What the newest tokens attend to, more of it in the lower layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from h2o_gguf.policies.snapkv import SnapKV

__all__ = ["PyramidKV"]


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """Keep as SnapKV does, which see.

    A policy has one budget; that of each layer, falling from the first to the last, is for who makes one such
    policy per layer.

    Source: arXiv 2406.02069.
    """

    name: ClassVar[str] = "pyramidkv"
