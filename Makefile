# One verb per job; `make help` lists them. Everything lands in .venv, build and dist.
MAKEFLAGS += --no-builtin-rules
PYTHON ?= python3
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)
NATIVE ?= ON
MODEL  ?= smollm2-135m
PYTEST_ARGS ?=
FIGURES ?= fidelity attention chat stream summarize prefill
BENCH_ARGS ?=

BIN := .venv/bin
RUNTIME := build/runtime
STOCK := build/stock
CODE := h2o_gguf bindings cli models tests scripts
NATIVE_FILES := CMakeLists.txt $(wildcard scripts/apply_patches.py scripts/fetch_sdist.py) \
	$(shell find native -type f ! -name '*.md')
# One archive and one build folder for the development install and the wheel.
DEFINES := -DH2OG_LLAMA_SDIST_DIR=$(CURDIR)/build/sdist -DH2OG_BUILD_TESTS=ON
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export CCACHE_BASEDIR ?= $(CURDIR)
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup chat model test lint typing sanitize figures bench depth wheel clean distclean FORCE

help: ## list the verbs
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | \
		while IFS="$$(printf '\t')" read -r verb text; do printf '  make %-10s %s\n' "$$verb" "$$text"; done
	@echo
	@echo '  JOBS=$(JOBS)      compilers at once'
	@echo '  NATIVE=ON   use all of this CPU; OFF: any x86-64, as wheels do'
	@echo '  CMAKE_ARGS= options for llama.cpp, such as -DGGML_CUDA=ON or -DGGML_VULKAN=ON'
	@echo '  H2OG_LLAMA_SDIST=  path of the llama-cpp-python source archive, for machines without a network'

setup: build/setup.stamp ## virtual environment, tools, and the runtime (minutes the first time, then nothing)

.venv/tools.stamp: pyproject.toml scripts/setup_venv.py
	$(PYTHON) scripts/setup_venv.py .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --group dev
	@touch $@

# Other options start from an empty CMake cache, so that none of the last ones stays behind.
build/options: FORCE
	@mkdir -p build
	@echo 'NATIVE=$(NATIVE) CMAKE_ARGS=$(CMAKE_ARGS)' | cmp -s - $@ || { \
		rm -f $(RUNTIME)/CMakeCache.txt; echo 'NATIVE=$(NATIVE) CMAKE_ARGS=$(CMAKE_ARGS)' > $@; }

build/setup.stamp: .venv/tools.stamp build/options $(NATIVE_FILES)
	CMAKE_ARGS='$(DEFINES) -DGGML_NATIVE=$(NATIVE) $(CMAKE_ARGS)' $(BIN)/python -m pip install -v \
		--no-build-isolation --config-settings=build-dir=$(RUNTIME) -e .
	@touch $@

model: setup ## fetch the default model (MODEL=NAME for another)
	$(BIN)/h2o-gguf models fetch $(MODEL)

# In a process group of its own: a Ctrl-C that stops an answer would end make as well.
chat: model ## talk to it
	@if [ -t 0 ]; then set -m; fi; $(BIN)/h2o-gguf chat -m $(MODEL)

test: setup ## native tests, then the Python tests (PYTEST_ARGS=...)
	$(BIN)/h2o-gguf models fetch $(MODEL) || echo 'No $(MODEL): tests that need it are skipped.' >&2
	$(BIN)/ctest --test-dir $(RUNTIME) --output-on-failure --no-tests=ignore
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup typing ## ruff, and mypy --strict
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

# mypy knows nothing of the mapping of folders to packages: show it the package as it is installed.
typing:
	@rm -rf build/typing && mkdir -p build/typing/h2o_gguf
	@ln -s $(CURDIR)/h2o_gguf/* $(addprefix $(CURDIR)/,bindings cli models) build/typing/h2o_gguf/

# Python has to load the sanitizers' libraries first; it frees little at exit, so leaks are looked for natively only.
SANITIZERS = $(shell c++ -print-file-name=libasan.so) $(shell c++ -print-file-name=libubsan.so)

sanitize: setup ## native tests and tests/native under AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DH2OG_SANITIZE=ON $(DEFINES) $(CMAKE_ARGS)
	$(BIN)/cmake --build build/sanitize
	$(BIN)/ctest --test-dir build/sanitize --output-on-failure --no-tests=ignore
	LD_PRELOAD='$(SANITIZERS)' ASAN_OPTIONS=detect_leaks=0 H2O_GGUF_LIB_PATH=$(CURDIR)/build/sanitize/bin \
		$(BIN)/python -m pytest tests/native

figures: model ## measure what the README shows (hours on two cores; FIGURES="fidelity chat" for some)
	for name in $(FIGURES); do \
		$(BIN)/python scripts/$$name.py $(MODEL) --out docs/figures/$$name || exit 1; \
	done

# llama.cpp as it is, from the same archive and by its own defaults: the libraries alone.
PINNED = $(shell sed -nE 's/^set\(H2OG_LLAMA_(VERSION|SHA256) "(.*)"\)/\2/p' native/llama.cmake)
LIBRARIES_ONLY := $(patsubst %,-DLLAMA_BUILD_%=OFF,COMMON TESTS TOOLS EXAMPLES SERVER APP UI MTMD)

$(STOCK)/stamp: .venv/tools.stamp build/options native/llama.cmake scripts/fetch_sdist.py
	rm -rf $(STOCK) && mkdir -p $(STOCK)/source
	sdist=$$($(BIN)/python scripts/fetch_sdist.py $(PINNED) build/sdist) && \
		tar -xf "$$sdist" -C $(STOCK)/source --strip-components=3 --wildcards '*/vendor/llama.cpp/*'
	GIT_CEILING_DIRECTORIES=$(CURDIR) $(BIN)/cmake -S $(STOCK)/source -B $(STOCK) -G Ninja $(LIBRARIES_ONLY) $(CMAKE_ARGS)
	$(BIN)/cmake --build $(STOCK)
	@touch $@

bench: model $(STOCK)/stamp ## speed beside an unmodified llama.cpp (minutes on two cores; BENCH_ARGS=...)
	$(BIN)/h2o-gguf bench $(MODEL) --stock $(STOCK)/bin --out docs/figures/bench $(BENCH_ARGS)

depth: model $(STOCK)/stamp ## speed after 24,000 tokens beside a full cache (MODEL=NAME with a context for them)
	$(BIN)/python scripts/depth.py $(MODEL) --stock $(STOCK)/bin --out docs/figures/depth

wheel: .venv/tools.stamp ## a wheel for any x86-64, in dist
	CMAKE_ARGS='$(DEFINES) -DGGML_NATIVE=OFF $(CMAKE_ARGS)' $(BIN)/python -m build --wheel --no-isolation \
		--config-setting=build-dir=$(RUNTIME)

clean: ## remove what was built
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

distclean: clean ## and the virtual environment
	rm -rf .venv
