# Every target sets up what it needs (virtual environment, exact packages, default model) and is quick when nothing is to do.
#   make run            prepare the model, start router + prefill + decode, answer a question, serve until Ctrl-C
#   make run ONCE=1     the same, ending after the answer
#   make test           the suite          make check   ruff, mypy, import-linter, buf
#   make sweep | soak   the long ones      make bench   measurements
#   make simulate SEEDS=10000   simulated clusters, each from a seed
#   make protos         generate stubs     make lock    resolve requirements.lock anew
#   make bench PEERS=VLLM_DIR,OPENVINO_DIR   engines beside vLLM and OpenVINO, in turn; docs/benchmarks.md is written
#   make bench ARGS=paper   the paper's tables, simulated over the real block manager and scheduler
# PYTHON chooses the interpreter (3.11 or later) the environment is made with; ARGS is passed on to kvferry or pytest.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROTOS := $(wildcard proto/kvferry/v1/*.proto)
TORCH := torch==2.13.0
SEEDS ?= 10000
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet

.PHONY: run test check simulate sweep soak bench protos lock setup model format
.DELETE_ON_ERROR:

run: setup
	$(BIN)/kvferry up --demo $(if $(ONCE),--once) $(ARGS)

test: setup model
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/buf lint

simulate: setup
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --jobs $$(nproc) $(ARGS)

sweep: setup model
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m sweep --timeout 7200 $(ARGS)

soak: setup model
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m soak --timeout 7200 $(ARGS)

bench: setup model
	$(BIN)/python -m bench $(if $(PEERS),engine --peers $(PEERS) --page docs/benchmarks.md --out docs/plots $(ARGS),$(or $(ARGS),engine))

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(STAMP)

model: setup
	$(BIN)/kvferry models prepare

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvferry needs Python 3.11 or later; this is " + sys.version.split()[0] + ". Choose another with PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing the packages of requirements.lock into $(VENV)"
	@$(PIP) install -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation --editable . > $(VENV)/install.log 2>&1 || { cat $(VENV)/install.log; exit 1; }
	@touch $@

protos: $(VENV)/.protos

# One protoc run writes all stubs; the repository root as -I makes their imports absolute.
$(VENV)/.protos: $(PROTOS) $(STAMP)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. --mypy_grpc_out=. $(PROTOS)
	@touch $@

# Resolved in an environment of its own, so that nothing installed by hand slips in; +local suffixes name this machine's build.
lock:
	$(PYTHON) -m venv --clear .venv-lock
	.venv-lock/bin/python -m pip --disable-pip-version-check install --quiet '$(TORCH)' '.[bench,dev]'
	{ head -1 requirements.lock; .venv-lock/bin/python -m pip --disable-pip-version-check freeze --exclude kvferry --exclude pip; .venv-lock/bin/python -c 'from importlib.metadata import version; print("setuptools==" + version("setuptools"))'; } \
	  | sed -E 's/\+[a-z0-9.]+$$//' | awk '!seen[$$0]++' > requirements.lock.new
	mv requirements.lock.new requirements.lock
	rm -rf .venv-lock
