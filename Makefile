# A target that runs Python first installs what it needs into .venv. PY=python3 uses that Python, and installs nothing.

ifeq ($(origin PY),command line)
runtime :=
dev :=
else
override PY := .venv/bin/python
runtime := .venv/runtime
dev := .venv/dev
endif
N ?= 2

.PHONY: help setup bench climb script-is-named amp limit scale test diff clean
.NOTPARALLEL: # two benches at once would disturb each other

# .venv is built anew if its Python was upgraded or removed.
ifneq ($(shell .venv/bin/python -c 'import pip; print("works")' 2> /dev/null),works)
.PHONY: .venv/runtime
endif

help:
	@echo 'make setup         install what the stages need into .venv'
	@echo 'make bench         all stages, a table      (ARGS="--steps 20" for flags of bench.py)'
	@echo 'make climb SCRIPT="../nanoGPT/train.py --batch_size=8" PY=python'
	@echo '                   your own script, with one more technique in each row; PY is the'
	@echo '                   Python that runs it, since .venv lacks its packages'
	@echo 'make amp           s03 in float32, bfloat16 and float16'
	@echo 'make limit         s11 with larger and larger batches, on a card'
	@echo 'make scale N=2     s12 in one process and in several'
	@echo 'make test          the tests'
	@echo 'make diff N=5      what stage 5 changes, and why'
	@echo 'make clean         remove .venv and caches, keep results'
	@echo 'PY=python3 uses that Python and installs nothing (bench, climb, amp, limit, scale, test)'

setup: $(runtime)

.venv/runtime: requirements.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python3 is %d.%d: put 3.11 or newer on the PATH" % sys.version_info[:2])'
	.venv/bin/python -c 'import pip' 2> /dev/null || python3 -m venv --clear .venv
	.venv/bin/python -m pip install --quiet -r requirements.txt
	.venv/bin/python -c 'import numpy, tiktoken, torch' # a pip.conf may have made pip install them elsewhere
	touch $@

# If one of these is set, pip installs elsewhere.
unexport PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER

.venv/dev: requirements-dev.txt .venv/runtime
	.venv/bin/python -m pip install --quiet -r requirements-dev.txt
	touch $@

bench: $(runtime)
	@"$(PY)" bench.py $(ARGS)

climb: export COMMAND := $(value SCRIPT)
climb: script-is-named $(runtime)
	@"$(PY)" bench.py --climb "$$COMMAND" $(ARGS)

script-is-named:
	@test -n "$$COMMAND" || { echo 'make climb needs SCRIPT="../train.py"' >&2; exit 2; }

amp: $(runtime)
	@"$(PY)" bench.py "s03 --amp-dtype float32" "s03 --amp-dtype bfloat16" "s03 --amp-dtype float16" $(ARGS)

limit: $(runtime)
	@"$(PY)" -c 'import sys, torch; sys.exit(not torch.accelerator.is_available() and "make limit is for a card: on a CPU a large batch takes all memory of the machine")'
	@"$(PY)" bench.py $(foreach B,1 2 4 8 16 32 64 128 256,"s11 --batch-size $(B)") --rounds 1 $(ARGS)

scale: $(runtime)
	@"$(PY)" bench.py s12 "torchrun --standalone --nproc_per_node=$(N) s12" $(ARGS)

test: $(dev)
	@"$(PY)" -m pytest -q -n 2 --dist loadfile $(ARGS)

# make diff prints the docstring of stage N, and how it differs from stage N - 1 below the docstrings.
stages := $(sort $(wildcard stages/s[0-9][0-9]_*.py))
# If N is no number from 2 to 99, 99 takes its place, which no stage has.
number = $(firstword $(filter $(shell seq 2 99),$(N)) 99)
diff: new = $(word $(number),$(stages))
diff: old = $(word $(number),none $(stages))
# git diff exits with 1 if files differ.
diff:
	@test -e '$(old)' && test -e '$(new)' || { echo 'make diff N=$(N): N is the number of a stage, from 2 on' >&2; exit 2; }
	@sed -n '1,/^"""$$/p' $(new)
	@folder=$$(mktemp -d) && trap 'rm -r "$$folder"' EXIT && \
	for stage in $(old) $(new); do \
		sed '1,/^"""$$/d' $$stage > "$$folder/$$(basename $$stage)"; \
	done && \
	cd "$$folder" && { git --no-pager diff --no-ext-diff --no-index --no-prefix -w $(notdir $(old) $(new)); test $$? = 1; }

clean:
	rm -rf .venv .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
