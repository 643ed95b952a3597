#!/usr/bin/env bash
# The main job: an unmodified PyTorch program as ranks of an 8,192-rank world, on a machine without a GPU.
set -euo pipefail
bin=$1 out=$2
export PATH="$PWD/$bin:$PATH"
program=(python examples/train_gpt.py --mode ddp --layers 8 --hidden 1024 --heads 16 --seq 1024 --batch 8 --iters 4)
rm -rf "$out"; mkdir -p "$out"
say() { printf '\n== %s\n' "$*" >&2; }
say "collect: the execution graph of 8,192 ranks from a handful of processes"
prism collect --world-size 8192 --device emulated:h100-sxm -o "$out/job.prism" -- "${program[@]}"
say "replay: all 8,192 ranks virtual"
prism replay "$out/job.prism"
say "emulate: ranks 0 and 5 run the program, 8,190 ranks are virtual"
prism emulate "$out/job.prism" --sandbox 0,5 -o "$out/run" -- "${program[@]}"
say "emulate: the same with a straggler, rank 4242 (virtual, no neighbour of 0 or 5), 30 % slower"
prism emulate "$out/job.prism" --sandbox 0,5 --slow 4242=1.3 -o "$out/run-slow" -- "${program[@]}"
say "done: $out/run/summary.json, $out/run/report.html"
