#!/usr/bin/env bash
# From a fresh clone to a trained model in a few minutes on two CPU cores: installs packages,
# builds, prepares the functions of the Python standard library as a corpus, trains the built-in
# `demo` model, writes a report, and compares the layouts.
#   scripts/quickstart.sh [train_llama options]      e.g. --steps 50 for a shorter run
#   scripts/quickstart.sh --resume                   continues a run that was stopped
set -euo pipefail
cd "$(dirname "$0")/.."
case " $* " in *" --help "*) exec sed -n "2,6s/^# //p" "$0" ;; esac
say() { printf '\n== %s\n' "$*"; }

say 'packages'
scripts/setup.sh

say 'build'
make -j"$(nproc)" all

say 'data: the functions of the Python standard library, one document each'
if [ -e data/demo ]; then
    echo 'data/demo exists'
else
    # the system's python3, for the same corpus even if another one is installed
    stdlib=$(/usr/bin/python3 -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
    python3 scripts/python_functions.py "$stdlib" data/demo.partial
    mv data/demo.partial data/demo
fi

say 'train: each line ends with the time left (eta); Ctrl-C saves and stops'
case " $*" in *' --resume'*) replace= ;; *) replace=--overwrite ;; esac
./train_llama --train data/demo --out out/demo $replace --prompt 'def ' "$@" || {
    status=$?
    [ $status -ne 75 ] ||
        echo 'run scripts/quickstart.sh --resume to continue; without --resume it starts over'
    exit $status
}

say 'report'
python3 scripts/report.py out/demo

say 'packing changes only the time'
./train_llama --train data/demo --check-packing --micro-batch-tokens 4096 | tail -n 5
./train_llama --train data/demo --compare --max-seqlen 2048 | sed -un '/^layout/,$p'

say 'done'
echo 'out/demo/report.html  curves, samples, options: open it in a browser'
echo 'out/demo/final        the model; transformers loads it: from_pretrained("out/demo/final")'
echo 'next:'
echo '  ./train_llama --model out/demo/final --generate     continues what you type'
echo '  ./train_llama --train my_texts/ --out out/mine      your own texts, JSON Lines or chats'
echo '  scripts/chat_demo.sh                                a real model, fine-tuned on chats'
