#!/usr/bin/env bash
# What one GPU shows: its tests, the rate of each placement, equal bits in deterministic mode, a kill.
#   benchmarks/gpu_check.sh OUT [PYTHON]
# OUT gets summary.jsonl and, in runs.tar.gz, each run's result, metrics and output. About 8 minutes.
set -uo pipefail
final=$1
out=$(mktemp -d)
python=${2:-python3}
work=$(mktemp -d)
mkdir -p "$final"
atoll() { "$python" -m atoll "$@"; }
train() { # train NAME SETTING...
  local name=$1 started
  shift
  started=$(date +%s)
  timeout 240 "$python" -m atoll train --config 20m --set data.source=site-packages \
    --set data.cache_dir="$work/caches" --set runtime.output_dir="$work/$name" \
    --set training.tokens_per_parameters=1 --set training.epoch_tokens_per_parameters=1 \
    --set training.micro_batch_size=128 --set evaluation.batch_size=64 "$@" \
    >"$out/$name.stdout" 2>"$out/$name.stderr"
  echo "{\"run\": \"$name\", \"exit\": $?, \"seconds\": $(($(date +%s) - started))}" | tee -a "$out/summary.jsonl"
  cp "$work/$name/result.json" "$out/$name.result.json" 2>/dev/null
  cp "$work/$name/metrics.jsonl" "$out/$name.metrics.jsonl" 2>/dev/null
  tail -n 3 "$out/$name.stderr"
}

"$python" -m pytest -m gpu -p no:cacheprovider --continue-on-collection-errors 2>&1 | tee "$out/tests.txt" | tail -n 25
started=$(date +%s)
atoll prepare --config 20m --set data.source=site-packages --set data.cache_dir="$work/caches" \
  >"$out/prepare.stdout" 2>"$out/prepare.stderr"
echo "{\"run\": \"prepare\", \"exit\": $?, \"seconds\": $(($(date +%s) - started))}" | tee -a "$out/summary.jsonl"
tail -n 8 "$out/prepare.stderr"
for placement in ${PLACEMENTS:-device pinned pageable}; do
  train "$placement" --set data.placement=$placement --set training.checkpoint_policy=none
done
exact="--set runtime.deterministic=true --set training.checkpoint_policy=interval --set training.epoch_tokens_per_parameters=0.25"
# shellcheck disable=SC2086
train exact-1 $exact
# shellcheck disable=SC2086
train exact-2 $exact
# shellcheck disable=SC2086
ATOLL_FAILPOINTS=train.after_update:100=kill train exact-killed $exact
timeout 240 "$python" -m atoll train --resume "$work/exact-killed" >"$out/exact-resumed.stdout" 2>"$out/exact-resumed.stderr"
cp "$work/exact-killed/result.json" "$out/exact-resumed.result.json"
"$python" - "$out" <<'P' | tee -a "$out/summary.jsonl"
import json, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.result.json")):
    facts = json.loads(path.read_text())
    keys = ("status", "steps", "tokens_per_second", "parameter_digest", "validation_loss_nats_per_token")
    print(json.dumps({"run": path.name.split(".")[0], **{k: facts.get(k) for k in keys}}))
P
tar -czf "$final/runs.tar.gz" -C "$out" .
cp "$out/summary.jsonl" "$final/"
