"""Eviction policies: who goes when the cache is full.

A policy is a value with a budget and one method, victims(view, n). To add one, write a class like those
here and pass an instance; no registration is needed. See base.Policy.
"""

from h2o_gguf.policies.base import Policy, as_policy, ask, check_victims, is_policy
from h2o_gguf.policies.h2o import H2O
from h2o_gguf.policies.h2o_plus import H2OPlus
from h2o_gguf.policies.layers import LayerBudgets, pyramid
from h2o_gguf.policies.none import NoEviction
from h2o_gguf.policies.random import Random
from h2o_gguf.policies.registry import get, make, names
from h2o_gguf.policies.selection import Cells, Granularity, select_lowest
from h2o_gguf.policies.shares import AUTO, Budget, check_budget, resolve_budget
from h2o_gguf.policies.streaming import Streaming

__all__ = [
    "AUTO",
    "H2O",
    "Budget",
    "Cells",
    "Granularity",
    "H2OPlus",
    "LayerBudgets",
    "NoEviction",
    "Policy",
    "Random",
    "Streaming",
    "as_policy",
    "ask",
    "check_budget",
    "check_victims",
    "get",
    "is_policy",
    "make",
    "names",
    "pyramid",
    "resolve_budget",
    "select_lowest",
]
