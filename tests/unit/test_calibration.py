"""What a calibration measures, and which files it takes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from observations import plain_attention, view_of

from h2o_gguf.calibration import Calibration, layer_losses
from h2o_gguf.errors import OptionError
from h2o_gguf.fingerprint import fingerprint
from h2o_gguf.layer_budgets import read_layer_budgets
from h2o_gguf.policies import LeastLoss


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return str(path)


@pytest.fixture
def calibration(model: str) -> Calibration:
    return Calibration(
        "model",
        fingerprint(model),
        "0" * 64,
        1024,
        256,
        "h2o+",
        "rule",
        (0, 2),
        (8, 16),
        ((1, 0.5), (2, 0)),
    )


def test_the_loss_of_a_layer_is_the_change_of_its_output() -> None:
    """One query, one head at a time: softmax over what is left, times values, against all of them."""
    view = view_of(n_cells=20, n_used=20, n_past=20, same_pos=True, n_query=4)
    seen: Any = view.observation
    rng = np.random.default_rng(3)
    gone = [rng.random((2, 15)) < share for share in (0.0, 0.3, 0.7)]  # the newest five are later tokens
    for row in range(2):
        attention = plain_attention(view, row)
        expected = []
        for positions in gone:
            change, length = 0.0, 0.0
            for h, g, t in np.ndindex(attention.shape[:3]):
                p = {int(view.pos[row, h, c]): (attention[h, g, t, c], seen.v[row, h, c]) for c in range(20)}
                left = {i: each for i, each in p.items() if i >= 15 or not positions[h, i]}
                total = sum(share for share, _ in left.values())
                whole = sum(share * value for share, value in p.values())
                rest = sum(share / total * value for share, value in left.values())
                change += float(np.square(rest - whole).sum())
                length += float(np.square(whole).sum())
            expected.append(change / length)
        assert expected[0] == pytest.approx(0) and expected[1] < expected[2]
        np.testing.assert_allclose(list(layer_losses(view, row, gone)), expected, rtol=1e-5, atol=1e-12)


def test_what_was_saved_is_read_again(calibration: Calibration, model: str, tmp_path: Path) -> None:
    calibration.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json", model) == calibration
    split: Any = read_layer_budgets(str(tmp_path / "c.json"), model)
    assert split(12) == LeastLoss(12, (0, 2), (8, 16), ((1, 0.5), (2, 0)))
    assert split(12).over((0, 2), 0) == (8, 16), "2 saved by the second layer's eight, 0.5 by the first's"


def test_another_models_file_is_refused_by_name(calibration: Calibration, model: str, tmp_path: Path) -> None:
    calibration.save(tmp_path / "c.json")
    Path(model).write_bytes(b"other weights")
    with pytest.raises(OptionError, match=r"was calibrated on model, which is not the model in .*gguf"):
        read_layer_budgets(str(tmp_path / "c.json"), model)
    assert Calibration.load(tmp_path / "c.json") == calibration, "nobody asked which"


@pytest.mark.parametrize("text", ["", "{}", "[1, 2]", "\xff", '{"model": 1}'])
def test_a_file_of_something_else_is_no_calibration(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(text, encoding="latin-1")
    with pytest.raises(OptionError, match="is no calibration"):
        Calibration.load(tmp_path / "c.json")


@pytest.mark.parametrize(
    "change", [{"budgets": [16, 8]}, {"layers": [0]}, {"losses": [[1, 2]]}, {"losses": [[1, -2], [1, 2]]}]
)
def test_numbers_that_contradict_each_other_are_no_calibration(
    change: dict[str, Any], calibration: Calibration, tmp_path: Path
) -> None:
    (tmp_path / "c.json").write_text(json.dumps(asdict(calibration) | change))
    with pytest.raises(OptionError, match="is no calibration"):
        Calibration.load(tmp_path / "c.json")


def test_a_file_that_cannot_be_written_is_said(calibration: Calibration, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot write"):
        replace(calibration).save(tmp_path / "no" / "c.json")
