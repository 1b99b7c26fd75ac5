"""Measurements that need no model still run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_victims_are_timed(tmp_path: Path) -> None:
    out = tmp_path / "victims"
    policies = ["h2o+", "h2o", "streaming", "random"]
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "victims.py"), *policies, "--layers", "2", "--heads", "2",
         "--cells", "512", "-n", "8", "--repeat", "3", "--out", str(out)],
        check=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert [row[0] for row in rows] == policies
    assert all(float(ms) > 0 for row in rows for ms in row[1:])
