#!/bin/sh
# mypy reads everything: the packages at once, then each folder of tests with the plain modules (`agent`, `data`) that it sees.
cd "$(dirname "$0")/.." || exit 1
failed=0

read_types() {  # folder of plain modules, what to read
    MYPYPATH="$1" .venv/bin/mypy --no-error-summary $2 || failed=1
}

read_types . ""
read_types scripts:tests/clients/scripted:benchmarks:benchmarks/credit:benchmarks/credit/desk:benchmarks/peers:benchmarks/peers/two_tools:benchmarks/peers/pretrained_call:examples/calculator_smollm2:examples/text_to_sql:examples/text_to_sql/generator "conftest.py tests benchmarks scripts"
for tests in packages/*/tests; do
    read_types "$tests" "$tests"
done
for example in examples/*/; do
    read_types "$example:${example}generator:examples/text_to_sql:examples/text_to_sql/generator" "${example}tests"  # two_policies builds on that one
done
exit $failed
