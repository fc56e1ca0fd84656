#!/usr/bin/env bash
# The demo: why one finetunes a drafter. `make demo` calls it; each line is a command that you can type yourself.
# Finished stages are recognised, so a second run takes seconds and an interrupted one is taken up again.
set -euo pipefail
cd "$(dirname "$0")"
export PATH="$PWD/.venv/bin:$PATH"
export HF_HUB_OFFLINE=1 # everything is on this machine; no time-outs where there is no network

stage() {
    printf '\n[%d:%02d] python %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"
    python "$@"
}
config="--config configs/smollm2-demo.yaml"

stage -m common.demo_verifier

# Domain A: instructions. A base drafter from random weights, handed out in the layout of SpecForge and SGLang,
# as public EAGLE-3 heads are.
stage 01_prepare_data.py $config --run-dir runs/demo/base --source instructions
stage 01b_generate_synthetic.py $config --run-dir runs/demo/base
stage 02_build_vocab_map.py $config --run-dir runs/demo/base
stage 03_capture_hidden.py $config --run-dir runs/demo/base
stage 04_train.py $config --run-dir runs/demo/base --export specforge

# Domain B: code and arithmetic. The base is imported into a draft vocabulary rebuilt for B, and finetuned.
stage 01_prepare_data.py $config --run-dir runs/demo/finetuned --source code_math
stage 01b_generate_synthetic.py $config --run-dir runs/demo/finetuned
stage 02_build_vocab_map.py $config --run-dir runs/demo/finetuned
stage 03_capture_hidden.py $config --run-dir runs/demo/finetuned
stage 04_train.py $config --run-dir runs/demo/finetuned --finetune-from runs/demo/base/specforge --lr 5e-4

# What the base was worth: the same steps on the same data from random weights.
stage 04_train.py $config --run-dir runs/demo/scratch --data-from runs/demo/finetuned

# Served by vLLM on held-out prompts of both domains, counted by vLLM; the base as it is, in the public layout.
stage 05_evaluate.py $config --run-dir runs/demo/finetuned \
    --drafter base=runs/demo/base/specforge \
    --drafter finetuned=runs/demo/finetuned/drafter \
    --drafter scratch=runs/demo/scratch/drafter \
    --prompts runs/demo/finetuned/prompts/eval.jsonl \
    --prompts runs/demo/base/prompts/eval.jsonl

printf '\nDone in %d:%02d, setup not counted. Run folders: runs/demo; report and plot: runs/demo/finetuned/evaluation\n' \
    $((SECONDS / 60)) $((SECONDS % 60))
