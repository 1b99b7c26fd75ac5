"""Eviction policies: who goes when the cache is full.

A policy is a value with a budget and one method, victims(view, n). To add one, write a class like those
here and pass an instance; no registration is needed. See base.Policy.
"""

from h2o_gguf.policies.asking import ask, ask_traces, check_victims
from h2o_gguf.policies.base import Policy, as_policy, granularity_of, is_policy
from h2o_gguf.policies.dropkv import DropKV
from h2o_gguf.policies.expected_attention import ExpectedAttention
from h2o_gguf.policies.h2o import H2O
from h2o_gguf.policies.h2o_plus import H2OPlus
from h2o_gguf.policies.hcattention import HCAttention
from h2o_gguf.policies.keydiff import KeyDiff
from h2o_gguf.policies.knorm import KNorm
from h2o_gguf.policies.layers import LayerBudgets
from h2o_gguf.policies.lazy import Lazy
from h2o_gguf.policies.none import NoEviction
from h2o_gguf.policies.pyramidkv import pyramidkv
from h2o_gguf.policies.random import Random
from h2o_gguf.policies.registry import get, keeps, known_as, make, names
from h2o_gguf.policies.rkv import RKV
from h2o_gguf.policies.scissorhands import Scissorhands
from h2o_gguf.policies.selection import Cells, Granularity, select_highest, select_lowest
from h2o_gguf.policies.shares import AUTO, Budget, check_budget, resolve_budget
from h2o_gguf.policies.snapkv import SnapKV
from h2o_gguf.policies.splits import LeastLoss, Pyramid, Split, pyramid
from h2o_gguf.policies.staged import Staged
from h2o_gguf.policies.streaming import Streaming
from h2o_gguf.policies.tova import TOVA

__all__ = [
    "AUTO",
    "H2O",
    "RKV",
    "TOVA",
    "Budget",
    "Cells",
    "DropKV",
    "ExpectedAttention",
    "Granularity",
    "H2OPlus",
    "HCAttention",
    "KNorm",
    "KeyDiff",
    "LayerBudgets",
    "Lazy",
    "LeastLoss",
    "NoEviction",
    "Policy",
    "Pyramid",
    "Random",
    "Scissorhands",
    "SnapKV",
    "Split",
    "Staged",
    "Streaming",
    "as_policy",
    "ask",
    "ask_traces",
    "check_budget",
    "check_victims",
    "get",
    "granularity_of",
    "is_policy",
    "keeps",
    "known_as",
    "make",
    "names",
    "pyramid",
    "pyramidkv",
    "resolve_budget",
    "select_highest",
    "select_lowest",
]
