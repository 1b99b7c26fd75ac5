"""The explanation as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import Environment
from numpy.typing import NDArray

from h2o_gguf.explain.explanation import HEAVY_SHARE, MARKED_SHARE, Explanation, Shares
from h2o_gguf.explain.history import HELD

__all__ = ["N_LISTED", "render", "strongest"]

N_LISTED = 24  # entries named for each token of the answer
N_DIGITS = 5


def render(explanation: Explanation) -> str:
    """Return the page.  What the text says can neither end the data nor run: a hash names the one script."""
    template, style, script = (_asset(name) for name in ("page.html", "page.css", "page.js"))
    return (
        Environment(autoescape=True)
        .from_string(template)
        .render(
            title=f"{explanation.model}: why it was forgotten",
            policy=f"script-src '{_hash(script)}'; style-src '{_hash(style)}'",
            style=style,
            script=script,
            data=_json(page_data(explanation)),
        )
    )


def page_data(explanation: Explanation) -> dict[str, Any]:
    """What the script reads."""
    e = explanation
    events, codes = _codes(e.left, e.gaps)
    n_answer = len(e.texts) - e.n_prompt
    return {
        "model": e.model,
        "policy": e.policy,
        "budget": e.budget,
        "nSink": e.n_sink,
        "nRecent": e.n_recent,
        "pins": e.pins,
        "layers": e.layer_ids,
        "nHead": e.left.shape[1],
        "nPast": e.n_past,
        "nPrompt": e.n_prompt,
        "nAnswer": n_answer,
        "texts": e.texts,
        "events": events,
        "left": _packed(codes),
        "leftBytes": codes.itemsize,
        "gaps": _packed(e.gaps.astype("<i4")),
        "nEvictions": len(np.unique(np.concatenate([e.left[e.left != HELD], e.gaps[:, 3]]))),
        "nRecalls": len(np.unique(e.gaps[:, 4])),
        "markedShare": MARKED_SHARE,
        "heavy": _packed(np.packbits(e.heavy, axis=-1)) if e.has_scores else None,
        "heavyShare": HEAVY_SHARE,
        "kept": _lists(e.kept, e.kept_by_head),
        "missed": None
        if e.missed is None or e.missed_by_head is None
        else _lists(e.missed, e.missed_by_head),
        "whyNotMissed": e.why_not_missed,
    }


def _lists(rows: Shares, by_head: Shares) -> dict[str, Any]:
    """The strongest entries and the sum of all, for each token of the answer and for the answer as a whole.

    The latter by layer and by head, where index 0 is all of them and i + 1 the i-th.
    """
    layers = [slice(None), *(slice(i, i + 1) for i in range(by_head.shape[0]))]
    heads = [slice(None), *(slice(i, i + 1) for i in range(by_head.shape[1]))]
    means = [[by_head[layer, head].mean((0, 1)) for head in heads] for layer in layers]
    return {
        "byToken": [_list(row) for row in rows],
        "byHead": [[_list(row) for row in of_layer] for of_layer in means],
    }


def _list(row: Shares) -> dict[str, Any]:
    return {"sum": round(float(row.sum()), N_DIGITS), "entries": strongest(row)}


def strongest(row: Shares) -> list[tuple[int, float]]:
    """The positions with the largest shares, at most N_LISTED, and the shares; none without any."""
    order = np.argsort(-row, kind="stable")[:N_LISTED]
    return [(int(p), round(float(row[p]), N_DIGITS)) for p in order if row[p] >= 10.0**-N_DIGITS]


def _codes(left: NDArray[np.int32], gaps: NDArray[np.int32]) -> tuple[list[int], NDArray[Any]]:
    """The times something left or came back, and at which of them each entry left for good; their number for
    what is held.
    """
    events = np.unique(np.concatenate([left[left != HELD], gaps[:, 3], gaps[:, 4]]))
    codes = np.searchsorted(events, left)
    return events.tolist(), codes.astype("<u2" if len(events) < 1 << 16 else "<u4")


def _packed(array: NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode()


def _json(data: dict[str, Any]) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _asset(name: str) -> str:
    return resources.files("h2o_gguf.explain").joinpath(name).read_text(encoding="utf-8")
