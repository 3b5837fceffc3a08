# capsnet: `make demo` and `make test` do all of their own set-up; `make help` lists the rest.
PYTHON ?= python3
BIN := .venv/bin
RUN := runs/demo/mnist

.PHONY: help demo test lint bench serve clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# The environment is made once, and again only when pyproject.toml or constraints.txt changed.
.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch uv
	UV_COMPILE_BYTECODE=1 $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[dev]'
	touch $@

# A demo that was stopped goes on where it stood.
demo: .venv/ready  ## train the paper's CapsNet on MNIST for one epoch, evaluate it, draw figures
	$(BIN)/capsnet train mnist --epochs 1 --batch-size 64 --out $(RUN) $(if $(wildcard $(RUN)/config.json),--resume)
	$(BIN)/capsnet evaluate $(RUN)
	$(BIN)/capsnet reproduce fig3 --weights $(RUN) --out $(RUN)
	$(BIN)/capsnet reproduce fig4 --weights $(RUN) --out $(RUN)
	@echo
	@$(BIN)/python -c "import json; r = json.load(open('$(RUN)/result.json')); \
	  print(f\"{r['metrics']['mnist']['error_rate']:.2%} of the test digits wrong,\", \
	  f\"{r['seconds'] / 60:.0f} minutes of training.\")"
	@echo "Look at $(RUN)/fig3.png and $(RUN)/fig4.png; the numbers are in $(RUN)/result.json."
	@echo "Next: $(BIN)/capsnet serve --weights $(RUN) (the playground), $(BIN)/capsnet list (what else there is)."

test: lint  ## everything CI checks: ruff, mypy, the tests and the commands in the docs
	tests/install-browser
	$(BIN)/pytest -n 2 --dist worksteal

lint: .venv/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: .venv/ready  ## measure speed and memory against plain PyTorch
	$(BIN)/capsnet bench

serve: .venv/ready  ## open the playground at 127.0.0.1
	$(BIN)/capsnet serve

clean:  ## remove the environment and caches; runs/ stays
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
