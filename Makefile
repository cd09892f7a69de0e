# Everything a developer needs. `make demo` on a fresh clone needs Python 3.11, pip and git only.
#
# An active virtual environment is used as it is; otherwise one is made in .venv.

ifdef VIRTUAL_ENV
BIN := $(VIRTUAL_ENV)/bin
else
BIN := .venv/bin
endif
PYTHON3 ?= python3
STAMP := $(BIN)/.gazette-installed
DEV_STAMP := $(BIN)/.gazette-dev-installed
DOCS_STAMP := $(BIN)/.gazette-docs-installed
# Tests wait for processes, timers and disks more than they compute: two per core.
WORKERS ?= 4
# The tests of a file run in one process: they share fixtures. tests/conftest.py has the exceptions.
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: setup demo deploy-tools test test-long test-python test-python-short hostile constraints check fmt bench docs bench-spark faults faults-spark soak-stores fuzz-stores fuzz-spark fuzz-windows fuzz-timers fuzz-meaning timer-plants meaning-plants crash-matrix chaos chaos-plants soak sim sim-plants sim-consumers conformance cross-version protos clean

setup: $(DEV_STAMP)

$(BIN)/python:
	$(PYTHON3) -m venv .venv

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

$(STAMP): pyproject.toml | $(BIN)/python
	$(PIP) -e .
	@touch $@

# LOCKED=1 installs exactly what constraints.txt pins, and checks its hashes: CI does.
LOCKED ?=
$(DEV_STAMP): pyproject.toml $(if $(LOCKED),constraints.txt) | $(BIN)/python
ifneq ($(LOCKED),)
	$(PIP) --require-hashes -r constraints.txt
	$(PIP) --no-deps --no-build-isolation -e .
else
	$(PIP) -e '.[dev,docs]'
endif
	@touch $@ $(STAMP)

# Pin the newest versions that pyproject.toml permits, with the hashes of their files on the package index, for CI and for the image.
UV := build/constraints/bin/uv
COMPILE := $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
    --custom-compile-command 'make constraints' pyproject.toml deploy/build.in
constraints:
	$(PYTHON3) -m venv build/constraints
	build/constraints/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.5'
	$(COMPILE) --extra dev --extra docs --output-file constraints.txt
	$(COMPILE) --extra s3 --extra oidc --output-file deploy/constraints.txt

$(DOCS_STAMP): pyproject.toml | $(BIN)/python
	$(PIP) -e '.[docs]'
	@touch $@ $(STAMP)

demo: $(STAMP)
	$(BIN)/gazette demo $(ARGS)

check: $(DEV_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy gazette examples tools tests
	$(BIN)/lint-imports

fmt: $(DEV_STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# No test is run again when it fails: one that is not reliable is a defect.
test: $(DEV_STAMP)
	$(BIN)/python -m gazette.history.json_kernel
	$(BIN)/python -m pytest -m 'not faults and not spark and not long' $(PARALLEL) $(ARGS)
	$(BIN)/python -m pytest -m 'spark and not faults and not long' tests/spark tests/examples $(ARGS)

# Tests that take more than a few seconds by their nature: at most 25 minutes. CI runs them after `make test`.
test-long: $(DEV_STAMP)
	$(BIN)/python -m pytest -m 'long and not faults' $(PARALLEL) --timeout 600 $(ARGS)

# kubectl and Helm beside this Python, for tests that build what is in deploy/. Without them these are skipped.
deploy-tools: $(BIN)/kubectl
$(BIN)/kubectl: tools/deploy_tools.txt | $(DEV_STAMP)
	$(BIN)/python -m tools.deploy_tools $(BIN)
	@touch $@

# `make test` on another Python, with the same packages: PYTHON=python3.13, or the path of one.
PYTHON ?= python3.12
PYTHONS := build/pythons
OTHER_PYTHON = $(PYTHONS)/$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
test-python:
	$(PYTHON) -m venv $(OTHER_PYTHON)
	VIRTUAL_ENV=$(CURDIR)/$(OTHER_PYTHON) $(MAKE) LOCKED=1 setup test

# A plain installation there, and tests that need no more: less than a minute. CI runs it for each Python that it has.
SHORT := tests/broker/test_append_fsm.py tests/protocol tests/test_codecs.py tests/message/test_sequencer.py tests/stores/test_sqlite.py
test-python-short:
	$(PYTHON) -m venv $(OTHER_PYTHON)-short
	sed '/--hash/d; /^ *#/d; s/ *\\$$//' constraints.txt > $(OTHER_PYTHON)-short/versions.txt
	$(OTHER_PYTHON)-short/bin/python -m pip install --quiet --disable-pip-version-check -c $(OTHER_PYTHON)-short/versions.txt \
	    -e . pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis
	$(OTHER_PYTHON)-short/bin/python -m pytest -m 'not faults and not spark and not long' $(PARALLEL) $(SHORT) $(ARGS)

# Hostile input in every matrix: tokens, calls, HTTP, TLS, connections, stored fragments, texts. Prints its seed, and what was tried and
# refused. `make test` has a short form. To repeat a run: HOSTILE_SEED=7. Then what others get of a broker
# that is attacked, and of the interop server of grpc-go if GRPC_INTEROP_SERVER names it (see `conformance`).
HOSTILE ?= 20
HOSTILE_SEED ?=
hostile: $(DEV_STAMP)
	GAZETTE_HOSTILE=$(HOSTILE) GAZETTE_HOSTILE_SEED=$(HOSTILE_SEED) $(BIN)/python -m pytest $(PARALLEL) --timeout 600 \
	    --ignore tests/hostile/test_others.py tests/hostile tests/test_authorization.py tests/test_http_guard.py \
	    tests/test_idle_connections.py tests/protocol/test_strict_yaml.py $(ARGS)
	GAZETTE_HOSTILE=$(HOSTILE) GRPC_INTEROP_SERVER=$(GRPC_INTEROP_SERVER) $(BIN)/python -m pytest -n 0 tests/hostile/test_others.py $(ARGS)

# Real processes, killed at random moments; prints its seeds. Not part of `make test`.
faults: $(DEV_STAMP)
	$(BIN)/python -m pytest -m 'faults and not spark' --timeout 3600 --ignore tests/faults/test_crash_matrix.py $(ARGS)

# A backfill on a standalone cluster of Spark (a master, two workers) whose processes die, a query from journals to journals that
# is killed, and Spark on each Java that is here.
faults-spark: $(DEV_STAMP)
	$(BIN)/python -m gazette.history.json_kernel
	$(BIN)/python -m pytest -s -m 'faults and spark' tests/faults/test_spark_cluster.py tests/faults/test_spark_chain.py tests/spark/test_java_runs.py $(ARGS)

# A million transactions on one shard of each kind: what their recovery logs cost, and that they stay bounded.
soak-stores: $(DEV_STAMP)
	$(BIN)/python benchmarks/soak_stores.py --store sqlite $(ARGS)
	$(BIN)/python benchmarks/soak_stores.py --store rocksdb $(ARGS)

# Random work on SQLite and RocksDB stores, cuts and pruning of their logs, standbys, and a plain database beside them.
# Prints its first seed, and for a failure how to repeat it: ARGS="--kind sqlite --seed 7 --seeds 100". `make test` has a short form.
FUZZ_MINUTES ?= 10
fuzz-stores: $(DEV_STAMP)
	$(BIN)/python -m tools.fuzz_stores --minutes $(FUZZ_MINUTES) $(ARGS)

# Random histories, read as tables, streams and backfills, against the sequencer, the specification of JSON and full replays. Each suite tries
# FUZZ (20) times as much as in `make test`. Hypothesis prints what fails, and how to repeat it; seeded tests begin at FUZZ_SEED.
FUZZ ?= 20
FUZZ_SEED ?= 0
fuzz-spark: $(DEV_STAMP)
	$(BIN)/python -m gazette.history.json_kernel
	GAZETTE_FUZZ_HISTORIES=$(FUZZ) GAZETTE_FUZZ_SEED=$(FUZZ_SEED) $(BIN)/python -m pytest $(PARALLEL) --timeout 3600 \
	    tests/history/test_histories.py tests/history/test_one_pass.py tests/history/test_summaries.py tests/history/test_tables.py tests/history/test_read.py \
	    tests/history/test_json_lines.py tests/spark/test_stream.py tests/backfill/test_histories.py $(ARGS)

# Random histories of windows and joins against lists that are searched by brute force: messages that are late or repeated, crashes, and
# members that take over while the former one commits. WINDOW_FUZZ (60) times as much as in `make test`: 12,000 small histories, 2,100 of
# hundreds of messages, and 9,000 clusters whose shards answer together.
WINDOW_FUZZ ?= 60
fuzz-windows: $(DEV_STAMP)
	GAZETTE_FUZZ_HISTORIES=$(WINDOW_FUZZ) $(BIN)/python -m pytest $(PARALLEL) --timeout 7200 \
	    -k 'equal_their_oracle or equal_plain_lists' tests/windows tests/consumer/test_list_histories.py $(ARGS)

# Random histories of timers in each store, in batches of up to 64 that set and cancel each other, against a model without batches.
# TIMER_FUZZ (40) times as much as in `make test`: 20,000 histories.
TIMER_FUZZ ?= 40
fuzz-timers: $(DEV_STAMP)
	GAZETTE_FUZZ_HISTORIES=$(TIMER_FUZZ) GAZETTE_FUZZ_SEED=$(FUZZ_SEED) $(BIN)/python -m pytest $(PARALLEL) --timeout 7200 \
	    tests/stores/test_timer_histories.py $(ARGS)

# Values of all kinds and types, written in each place and read back: equal, or refused by name. Places are messages of all types (flat,
# nested, of pydantic, protobuf, CSV), states, aggregates, joins, rows, fields, keys, declared times, timers, columns, outputs, dead letters,
# answers, stores, and lines of gazctl and HTTP. MEANING_FUZZ (20) times as much as in `make test`: 200,000 cases. They begin at
# FUZZ_SEED. A failure says the seed of its case: repeat it by FUZZ_SEED=that MEANING_FUZZ=1.
MEANING_FUZZ ?= 20
fuzz-meaning: $(DEV_STAMP)
	GAZETTE_FUZZ_HISTORIES=$(MEANING_FUZZ) GAZETTE_FUZZ_SEED=$(FUZZ_SEED) $(BIN)/python -m pytest $(PARALLEL) --timeout 7200 \
	    tests/meaning $(ARGS)

# A member dies at each point of a transaction, with each kind of store, GAZETTE_REPEATS (10) times: 20 to 40 minutes.
crash-matrix: $(DEV_STAMP)
	$(BIN)/python -m pytest -m faults -s tests/faults/test_crash_matrix.py tests/faults/test_frozen_members.py $(ARGS)

# A cluster under load, broken for 20 minutes, and every byte checked: ARGS="--minutes 5 --seed 7 --replication 3".
chaos: $(STAMP)
	$(BIN)/gazette chaos $(ARGS)

# The same with a mistake in its brokers, one at a time, which it must find: about 9 minutes. ARGS="lives-by-name" runs one of them,
# ARGS="--without" the same runs without the mistakes.
chaos-plants: $(DEV_STAMP)
	$(BIN)/python -m tools.chaos_plants $(ARGS)

# Timers, windows, joins and lists with a mistake in a copy of the source, one at a time: which test finds each. About 10 minutes.
# ARGS="late-rows-are-accepted" has one of them. Exit code 1 if one is not found.
timer-plants: $(DEV_STAMP)
	$(BIN)/python -m tools.timer_plants $(ARGS)

# A door that changes a value in silence, in a copy of the source, one at a time: which check of `make fuzz-meaning` finds each. About
# 4 minutes. ARGS="'small integers wrap'" has one of them. Exit code 1 if one is not found.
meaning-plants: $(DEV_STAMP)
	$(BIN)/python -m tools.meaning_plants $(ARGS)

# stream-sum on real processes, with faults on all of them; prints its seed. Exit code 1 on a violation.
MINUTES ?= 30
soak: $(DEV_STAMP)
	$(BIN)/gazette soak --minutes $(MINUTES) $(ARGS)

# The shipped brokers and clients on a virtual loop, network, disk and store, with faults: ARGS="--first 1000 --workers 2".
# Prints seeds per second; a seed that violates an invariant with its trace, and how to replay it.
SEEDS ?= 1000
sim: $(DEV_STAMP)
	$(BIN)/python -m tools.simulation --seeds $(SEEDS) $(ARGS)

# Brokers with a mistake, one after the other: at which seed the same simulation finds each. ARGS="--plant lives-by-name" has one of
# them, ARGS="--consumers" those of members. Exit code 1 if one is not found within PLANT_SEEDS.
PLANT_SEEDS ?= 20000
sim-plants: $(DEV_STAMP)
	$(BIN)/python -m tools.simulation --plants --seeds $(PLANT_SEEDS) $(ARGS)

# The same with members of an application that folds its input, whose threads take turns in virtual time.
sim-consumers: $(DEV_STAMP)
	$(BIN)/python -m tools.simulation --consumers --seeds $(SEEDS) $(ARGS)

# Programs of others against our HTTP/2, without and with TLS. One that is not named is left out. To make them:
#   go install github.com/summerwind/h2spec/cmd/h2spec@latest          (H2SPEC=~/go/bin/h2spec)
#   go install google.golang.org/grpc/interop/client@latest            (GRPC_INTEROP=~/go/bin/client)
#   go install google.golang.org/grpc/interop/server@latest            (GRPC_INTEROP_SERVER=~/go/bin/server)
H2SPEC ?=
# GAZETTE_GO names the directory of the original's programs: a broker of it and two of ours are one cluster then. With `tally` in it, shards
# change hands between that application of the original and ours. To make it, in a clone of the original, with librocksdb-dev and
# libsqlite3-dev of Debian 12 (RocksDB 7.8, SQLite 3.40):
#   go build -tags libsqlite3 -o DIRECTORY ./cmd/gazette ./cmd/gazctl
#   go build -tags libsqlite3 -o DIRECTORY/tally THIS/tools/conformance/original/tally.go
GRPC_INTEROP ?=
GRPC_INTEROP_SERVER ?=
GAZETTE_GO ?=
conformance: $(DEV_STAMP)
	$(BIN)/python -m tools.conformance $(if $(H2SPEC),--h2spec $(H2SPEC)) $(if $(GRPC_INTEROP),--interop $(GRPC_INTEROP)) \
	    $(if $(GRPC_INTEROP_SERVER),--interop-server $(GRPC_INTEROP_SERVER)) $(if $(GAZETTE_GO),--original $(GAZETTE_GO))

# The examples, one of them with tables, and an application of timers, windows and joins, each simulated unmodified: `gazette test` of users.
EXAMPLE_SEEDS ?= 1000
EXAMPLE_TEST := PYTHONPATH=examples:. $(BIN)/gazette test --seeds $(EXAMPLE_SEEDS)
simulate-examples: $(DEV_STAMP)
	$(EXAMPLE_TEST) first_application:WordCount $(ARGS)
	$(EXAMPLE_TEST) word_count.app:WordCount --journals tests/simulate/word_count_journals.yaml \
	    --shards tests/simulate/word_count_shards.yaml --backfill word_count.backfill:WordCountBackfill $(ARGS)
	$(EXAMPLE_TEST) stream_sum.app:Summer --journals examples/stream_sum/journals.yaml --shards examples/stream_sum/shards.yaml \
	    --load tests.simulate.loads:chunks --transactions recorded $(ARGS)
	$(EXAMPLE_TEST) bike_share.app:BikeShare --journals examples/bike_share/journals.yaml --shards examples/bike_share/shards.yaml \
	    --load tests.simulate.loads:rides --backfill bike_share.backfill:BikeShareBackfill $(ARGS)
	$(EXAMPLE_TEST) tests/simulate/timed_app.py $(ARGS)
	$(EXAMPLE_TEST) order_totals:OrderTotals $(ARGS)
	$(if $(DATABASE),$(EXAMPLE_TEST) tests.simulate.sql_word_count:SQLWordCount --journals tests/simulate/word_count_journals.yaml \
	    --shards tests/simulate/sql_word_count_shards.yaml --database $(DATABASE) $(ARGS))

# Another version and this one share a cluster, logs and stores: in the simulation, and as processes. OTHER is a revision; the default is the
# last tag. Its checkout and its environment stay below build/, for the next run.
OTHER ?= $(shell git describe --tags --abbrev=0)
CROSS_SEEDS ?= 1000
cross-version: $(DEV_STAMP)
	@test -n "$(OTHER)" || { echo "no version is tagged yet: name a revision by OTHER="; exit 2; }
	test -d build/versions/$(OTHER) || git worktree add --detach build/versions/$(OTHER) $(OTHER)
	env -u VIRTUAL_ENV $(MAKE) -C build/versions/$(OTHER) setup
	$(BIN)/python -m tools.conformance --version build/versions/$(OTHER)
	$(BIN)/python -m tools.simulation --other build/versions/$(OTHER) --seeds $(CROSS_SEEDS) --workers 2
	$(BIN)/python -m tools.simulation --other build/versions/$(OTHER) --seeds $(CROSS_SEEDS) --workers 2 --consumers

bench: $(DEV_STAMP)
	$(BIN)/gazette bench $(ARGS)

# Folding a history with Spark, beside spark.read.json and a shard that consumes it: ARGS="--messages 20000000".
bench-spark: $(DEV_STAMP)
	$(BIN)/python benchmarks/bench_spark.py $(ARGS)

# The pages of docs/ as a site in build/site; broken links are errors.
# The API reference is read from the source: neither Spark nor a database is needed.
docs: $(DOCS_STAMP)
	$(BIN)/mkdocs build --quiet

protos: $(DEV_STAMP)
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
	    gazette/protocol/pb/*.proto gazette/cluster/etcd/pb/*.proto

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
