"""Every policy goes on behind recalls: it names victims, keeps its budget, and is saved and restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import random_tokens, require_runtime
from tiny_models import build

from h2o_gguf.errors import OptionError
from h2o_gguf.explain.recording import Recording
from h2o_gguf.policies import names

BUDGET = 96
EVICTING = [name for name in names() if name != "none"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_runtime()
    return build("llama", tmp_path_factory.mktemp("models") / "llama.gguf", n_ctx_train=512)


class Drawing:
    """Any token."""

    def __init__(self) -> None:
        self.tokens = iter(random_tokens(1000, seed=9))

    def sample(self, logits: Any, tokens: Any) -> int:
        return next(self.tokens)

    def accept(self, token: int) -> None: ...


def opened(model: Path, name: str, **options: Any) -> Any:
    from h2o_gguf import H2OLlama

    return H2OLlama(
        str(model), policy=name, kv_budget=BUDGET, n_batch=32, attic="ram", recall_every=5, n_threads=1,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", EVICTING)
def test_a_policy_goes_on_behind_recalls(name: str, model: Path) -> None:
    with opened(model, name) as llm:
        engine = llm.engine
        tokens = random_tokens(500)
        engine.sync(tokens[:400])
        assert engine.report().attic.recalled > 0, "a long prompt recalls at its end what it lost on the way"
        list(engine.generate(Drawing(), max_tokens=40))
        engine.sync([*engine.tokens, *tokens[400:450]])
        before, session = list(engine.tokens), llm.save_state()
        llm.reset()
        llm.load_state(session)
        assert engine.tokens == before
        engine.sync([*before, *tokens[450:]])
        report = engine.report()
        assert report.used == BUDGET and report.attic.entries == report.n_past - BUDGET


def test_heads_of_a_layer_recall_the_same(model: Path) -> None:
    with opened(model, "h2o", granularity="layer") as llm:
        llm.engine.sync(random_tokens(400))
        view = llm.engine.view()
        assert view is not None and view.recalled is not None
        assert (view.pos == view.pos[:, :1]).all() and (view.recalled == view.recalled[:, :1]).all()
        assert len({tuple(sorted(layer[0])) for layer in view.pos}) > 1, "and layers what they attend to"


@pytest.mark.parametrize("name", [name for name in EVICTING if name != "pyramidkv"])
def test_with_one_list_for_all_layers_all_recall_the_same(name: str, model: Path) -> None:
    """And what was asked with is read as if it had never been read before."""
    with opened(model, name, granularity="token") as llm:
        engine = llm.engine
        tokens = random_tokens(460)
        engine.sync(tokens[:400])
        assert engine.report().attic.recalled > 0
        for n in (400, 440, 460):
            engine.sync(tokens[:n])
            view = engine.view()
            assert (view.pos == view.pos[:1, :1]).all()
            assert view.recalled is not None and (view.recalled == view.recalled[:1, :1]).all()
            assert engine.tokens == tokens[:n]
        list(engine.generate(Drawing(), max_tokens=40))
        assert engine.report().used == BUDGET


@pytest.mark.parametrize("arch", ["jamba", "lfm2"])
def test_a_model_that_cannot_forget_a_question_has_no_attic_for_one_list(arch: str, tmp_path: Path) -> None:
    path = build(arch, tmp_path / "m.gguf")
    with pytest.raises(OptionError, match="recurrent state cannot forget"):
        opened(path, "h2o", granularity="token")
    opened(path, "h2o", granularity="layer").close()


@pytest.mark.parametrize("granularity", ["head", "layer", "token"])
def test_a_recording_knows_what_was_held_behind_every_recall(granularity: str, model: Path) -> None:
    with opened(model, "h2o+", granularity=granularity) as llm:
        engine = llm.engine
        recording = Recording(engine)
        asking: list[str] = []
        engine.on_recall.append(lambda _view, _n_tokens, how: asking.append(how))
        held = {}
        for i in range(5):
            engine.prefill(random_tokens(20, seed=5 + i))
            engine.prefill(random_tokens(40, seed=i), recall=True)
            pos = engine.view().pos
            entries = {(i, h, int(p)) for i, h in np.ndindex(pos.shape[:2]) for p in pos[i, h] if p >= 0}
            held[engine.n_past] = entries
            engine.prefill(random_tokens(1))  # what comes back at a time is taken to be held then
        history = recording.history()
        for n, expected in held.items():
            assert set(map(tuple, np.argwhere(history.held(n)).tolist())) == expected
        assert len(history.recalls) == len(asking) and len(history.gaps) > 0
        assert set(asking) == ({"question"} if granularity == "token" else {"question", "text"})
        assert (history.gaps[:, 3] <= history.gaps[:, 4]).all() and (history.leaves(100) >= 0).all()
