"""Every error: one root, a builtin to catch, an exit code, numbers in the text, survives pickling."""

import copy
import pickle

import pytest

from h2o_gguf import errors
from h2o_gguf.errors import H2OError

SAMPLES = {
    "ContextOverflowError": (errors.ContextOverflowError(300, 256), ValueError, 4),
    "BudgetError": (errors.BudgetError("no", budget=64, n_sink=60, n_recent=8), ValueError, 2),
    "CacheFullError": (errors.CacheFullError(512, 512), RuntimeError, 4),
    "PolicyError": (errors.PolicyError("it raised", policy="mine"), RuntimeError, 1),
    "OptionError": (errors.OptionError("type_v needs flash_attn", "type_v", "flash_attn"), ValueError, 2),
    "OutOfMemoryError": (errors.OutOfMemoryError("no", n_bytes=9, n_available=8), MemoryError, 4),
    "UnsupportedModelError": (errors.UnsupportedModelError("mamba", "it has no KV cache"), ValueError, 3),
    "ModelFileError": (errors.ModelFileError("/m.gguf", "it is empty"), OSError, 3),
    "ChecksumError": (errors.ChecksumError("/m.gguf", "aa", "bb"), OSError, 3),
    "StateFileError": (errors.StateFileError("another model's", path="/s"), ValueError, 2),
    "NativeError": (errors.NativeError("decode failed", -3), RuntimeError, 5),
    "LibraryError": (errors.LibraryError("no library"), ImportError, 5),
    "BusyError": (errors.BusyError(), RuntimeError, 1),
    "ClosedError": (errors.ClosedError("the model"), ValueError, 1),
    "Cancelled": (errors.Cancelled(), RuntimeError, 130),
    "H2OError": (H2OError("why"), Exception, 1),
}


def test_every_public_class_has_a_sample() -> None:
    assert sorted(SAMPLES) == [name for name in errors.__all__ if isinstance(getattr(errors, name), type)]


@pytest.mark.parametrize("name", SAMPLES)
def test_error_has_one_root_a_builtin_and_an_exit_code(name: str) -> None:
    error, builtin, exit_code = SAMPLES[name]
    assert isinstance(error, H2OError)
    assert isinstance(error, builtin)
    assert error.exit_code == exit_code
    assert str(error)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("duplicate", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_error_survives_copy_and_pickle_with_its_numbers(name: str, duplicate: object) -> None:
    error = SAMPLES[name][0]
    again = duplicate(error)  # type: ignore[operator]
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_overflow_names_both_numbers_and_the_http_answer() -> None:
    assert "may be evicted" not in str(errors.ContextOverflowError(300, 256, evicts=True))
    error = errors.ContextOverflowError(300, 256)
    assert "300" in str(error)
    assert "256" in str(error)
    assert (error.n_prompt_tokens, error.n_ctx) == (300, 256)
    assert (error.http_status, error.http_type) == (400, "exceed_context_size_error")


def test_file_errors_name_the_file_and_the_reason() -> None:
    error = errors.ModelFileError("/models/m.gguf", "it has 4 bytes")
    assert "/models/m.gguf" in str(error)
    assert "it has 4 bytes" in str(error)
    assert error.errno is None


def test_budget_error_sums_what_is_protected() -> None:
    assert errors.BudgetError("no", budget=64, n_sink=60, n_recent=8, n_pinned=2).n_protected == 70


def test_option_error_names_its_options() -> None:
    assert errors.OptionError("no", "type_v", "flash_attn").options == ("type_v", "flash_attn")
