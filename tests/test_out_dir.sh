#!/usr/bin/env bash
# The output directory: files copied into checkpoints, --overwrite and --resume, directories that vanish.
. "$(dirname "$0")/lib.sh"
tiny_model tiny 24 40 8
corpus 31
common=(--model tiny --from-scratch --train corpus --max-seqlen 64 --micro-batch-tokens 256
        --batch-tokens 512 --val-every 0 --val-tokens 512 --num-samples 0 --lr 1e-3)
run=("$train" "${common[@]}" --threads 1)
resume=("$train" --threads 1 --resume)
names() { (cd "$1" && echo *); }
# ---- tokenizer and config files in checkpoints ------------------------------------------------------
cp -r tiny chat
companions=(tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt
            tokenizer.model chat_template.jinja)
cp corpus/tokenizer.json chat
for f in "${companions[@]}"; do echo "{\"made for\": \"$f\"}" > "chat/$f"; done
cp corpus/tokenizer_config.json chat
echo '{"eos_token_id": [257, 7], "pad_token_id": 3, "temperature": 0.6, "transformers_version": "4"}' \
    > chat/generation_config.json
expect companions_run 0 done "${run[@]}" --model chat --out c --steps 2
mv chat chat.aside
expect companions_resumed_without_the_model 0 done "${resume[@]}" --out c --steps 4 --save-every 1 --keep 1
for f in tokenizer.json generation_config.json "${companions[@]}"; do
    same "resumed_final_has_the_model's_$f" "chat.aside/$f" c/final/"$f"
done
mv chat.aside chat
rm chat/generation_config.json
sed -i 's/"eos_token_id": 257/"eos_token_id": [257, 7]/' chat/config.json
expect no_generation_config_run 0 done "${run[@]}" --model chat --out c2 --steps 1
check_python every_end_token_is_in_both << 'PY'
for name in "config", "generation_config":
    assert json.load(open("c2/final/%s.json" % name))["eos_token_id"] == [257, 7], name
PY
# a longer context than the model's is trained, and written down
sed -i 's/"max_position_embeddings": 2048/"max_position_embeddings": 32/' chat/config.json
expect a_longer_context 0 '^warning: --max-seqlen 64 is beyond max_position_embeddings 32 of chat' "${run[@]}" --model chat --out c3 --steps 1
has is_in_final '"max_position_embeddings": 64,' c3/final/config.json
expect it_resumes 0 done "${resume[@]}" --model chat --out c3 --steps 2
# ---- --overwrite ------------------------------------------------------------------------------------------
expect old_run 0 done "${run[@]}" --out o --steps 8 --save-every 2 --keep 3
cp -r o old
expect resume_and_overwrite 2 'overwrite' "${run[@]}" --out o --resume --overwrite
expect overwrite 0 done "${run[@]}" --out o --steps 1 --lr 1e-4 --overwrite
check overwrite_leaves_nothing_of_the_old_run test "$(names o)" = 'final log.jsonl options step-00000001'
mkdir m && cp -r old/final m
expect overwrite_does_not_delete_its_own_model 2 'm/final' "$train" --model m/final --train corpus --max-seqlen 64 \
    --micro-batch-tokens 256 --out m --steps 1 --overwrite
# ---- --resume: which checkpoint ------------------------------------------------------------------------
cp -r old r
expect older_than_the_newest 2 'r/step-00000008' "${run[@]}" --out r --steps 9 --resume=r/step-00000006
expect older_into_another_directory 0 'start +r/step-00000006' "${run[@]}" --out r2 --steps 8 --resume=r/step-00000006
same_state a_branch_has_the_same_bits r/step-00000008 r2/step-00000008
expect branch_into_a_directory_with_a_run 2 'found a run' "${run[@]}" --out old --steps 8 --resume=r2/step-00000008
expect resume_in_a_new_directory 0 'start +random weights' "${run[@]}" --out new --steps 2 --resume
cp -r old k && rm k/log.jsonl
expect checkpoints_without_a_log 2 'found a run' "${run[@]}" --out k --steps 9
mkdir -p others/final && echo mine > others/final/thesis.txt
expect a_final_of_others 2 'found final/' "${run[@]}" --out others --steps 9
has it_is_kept mine others/final/thesis.txt
expect out_in_a_model_of_a_run 2 'outside of models, found old/final/manifest.json' "${run[@]}" --out old/final/x/y
check out_outside_by_dots env -C old/final "${run[@]}" --model "$work/tiny" --train "$work/corpus" --out ../../dots --steps 1
# without --train nothing starts: not in a directory without a run, not over one that was killed early
expect resume_in_a_mistyped_directory 3 '^error: typo: no run here$' "${resume[@]}" --out typo
check it_is_not_made test ! -e typo
start_long "${run[@]}" --out "killed' early" --steps 1000000
end_long KILL
cp -r "killed' early" early && steps=$(grep -c '"loss"' early/log.jsonl)
expect resume_without_a_checkpoint 3 "^error: killed' early: a run without a checkpoint, $steps steps?\$" \
    "${resume[@]}" --out "killed' early"
has hint_of_its_options "^hint: --options killed' early/options --out killed' early --overwrite starts it again" out.txt
check nothing_of_it_is_lost diff -r -x .lock "killed' early" early
expect with_train_it_starts 0 'start +random weights' "${run[@]}" --out early --steps 2 --resume
check and_its_log_is_of_these_steps test "$(grep -c '"loss"' early/log.jsonl)" -eq 2
expect its_options_start_it_again 0 done "$train" --options "killed' early/options" --out "killed' early" --overwrite --steps 2
check from_the_beginning test "$(grep -c '"loss"' "killed' early/log.jsonl")" -eq 2
mkdir empty
expect resume_without_a_run 3 '^error: empty: no run here$' "${resume[@]}" --out empty
expect resume_in_an_empty_directory 0 '^warning: empty: no checkpoint' "${run[@]}" --out empty --steps 2 --resume
rm -rf l && cp -r old l && rm -r l/step-*
expect checkpoints_deleted_final_kept 3 'final' "${run[@]}" --out l --steps 8 --resume
rm -r l/final && sed -i 's/^{"step": 8,/{"step": 9,/' l/log.jsonl && cp l/log.jsonl 9.jsonl
expect checkpoints_deleted_log_kept 3 'log.jsonl' "${run[@]}" --out l --steps 8 --resume
same log_of_lost_checkpoints_is_kept l/log.jsonl 9.jsonl
sed -i '/"step": [3-9],/d' l/log.jsonl
expect log_ends_where_the_first_checkpoint_was_due 0 'start +random weights' "${run[@]}" --out l --steps 8 --resume
# ---- --resume restores the options of the run ------------------------------------------------------------
options=(--schedule cosine --weight-decay 0.2 --seed 7 --long-docs truncate --deterministic --grad-clip 0.5
         --min-lr-frac 0.1 --keep 0)
expect with_options 0 done "${run[@]}" "${options[@]}" --out p --steps 6 --save-every 3
cp -r p q.linked && ln -s q.linked q && rm -r q/step-00000006 q/final
expect bare_resume 0 'start +q/step-00000003' "${resume[@]}" --out q
lacks bare_resume_lists_no_changes '^resume: ' out.txt
same_state bare_resume_has_the_same_bits {p,q}/step-00000006
rm -r q/step-00000006 q/final
expect bare_resume_with_changes 0 '^resume: --deterministic true -> false$' "${resume[@]}" --out q --steps 5 --seed 7 \
    --no-deterministic
expect another_run_holds_it 10 'directory in use' flock q/.lock "${resume[@]}" --out q
exec 9> q/.lock && flock 9
sleep 1 &   # inherits the lock
exec 9>&-
expect the_end_of_another_run_is_waited_for 0 'start +q/step-00000005' "${resume[@]}" --out q
expect dry_run_while_another_run_has_the_lock 0 'start +q/step-00000005' flock q/.lock "${resume[@]}" --out q --dry-run
expect evaluation_while_another_run_has_the_lock 0 'start +q/step-00000005' flock q/.lock "${resume[@]}" --out q --steps 0
expect changed_plan 9 'seed \(was 7, is 8\)' "${resume[@]}" --out q --seed 8
# ---- --options: a run's own options start its twin ----------------------------------------------------------
expect twin 0 done "$train" --options p/options --threads 1 --out twin
same_state a_twin_has_the_same_bits {p,twin}/step-00000006
same a_twin_has_the_same_options {p,twin}/options
has what_was_given '^schedule cosine$' p/options
lacks of_another_start '^(out|threads|resume|options)' p/options
expect twin_of_a_resumed_run 0 '^step     6/6' "$train" --options q/options --threads 1 --out third --steps 6 --deterministic
same_state it_has_them_too {p,third}/step-00000006
printf '# one more\n\nsteps 7\n' > more
expect resumed_with_a_file 0 '^resume: --steps 6 -> 7$' "$train" --resume --out third --options more
lacks a_clean_resume_warns_of_nothing '^warning: ' out.txt
# ---- links; to checkpoints: tests/test_checkpoint.c, and locks: tests/test_io.c ----------------------------
mkdir n3
cp -r old n2 && cp -r old behind
ln -s ../behind n3/tokens
expect linked_tokens_are_made_again 0 done "${run[@]}" --model chat --train text --out n3 --steps 1
check nothing_behind_links_is_removed diff -r old behind
echo mine > file
ln -sf ../file n2/log.jsonl
expect log_is_a_link 4 'n2/log.jsonl: expected a regular file, found a symbolic link' "${run[@]}" --out n2 --steps 1 --overwrite
check nothing_behind_links_is_written test "$(cat file) $(names n2)" = "mine $(names old)"
# ---- files of others stay, and so does a directory with one in it -------------------------------------------
mkdir -p x/{tokens,val_tokens}
for dir in x/*; do echo mine > "$dir/file"; done
cp -r x x.before
text=("$train" --model chat --from-scratch --train text --max-seqlen 64 --micro-batch-tokens 256 --steps 1 --num-samples 0)
expect tokens_of_others 2 '^error: x/tokens/file: expected what this program wrote' "${text[@]}" --out x --overwrite
same they_are_kept {x,x.before}/tokens/file
rm -r x/tokens && echo '{"text": 1}' > x/log.jsonl && echo mine > x/.lock
expect a_log_of_others 2 '^error: x/log.jsonl: expected the log of a run' "${text[@]}" --out x --overwrite
rm x/log.jsonl
expect val_tokens_of_others 2 '^error: x/val_tokens/file: ' "${text[@]}" --out x --val text
same these_too {x,x.before}/val_tokens/file
has a_lock_of_others '^mine$' x/.lock
echo new > new.txt
expect validated_on_what_is_replaced 2 '^error: --val x/tokens: ' "${text[@]}" --train new.txt --out x --val x/tokens
for what in 'train final/mine.jsonl' 'bench step-00000006/mine.jsonl' 'model step-00000006/mine' 'options final/mine'; do
    rm -rf y && cp -r old y && set -- $what
    if [ "$1" = model ]; then cp -r chat "y/$2"; else echo "lr 1" > "y/$2"; fi && cp -r y z
    expect "overwrite_with_--$1_in_it" 2 "^error: y/$2: expected what" "${text[@]}" "--$1" "y/$2" --out y --overwrite
    check "--$1_is_there" diff -r -x .lock y z && rm -r z
done
cp -r old ours && cp -rl ours snapshot && cp -r ours before
expect a_snapshot_by_links 0 done "${resume[@]}" --out ours --steps 9
check is_not_written_to diff -r before snapshot
cp -r old bits && shards flip bits/final/model.safetensors 30000
eval=("$train" --eval --val corpus --model bits/final --max-seqlen 64 --micro-batch-tokens 256)
expect a_flipped_bit_in_a_model 3 '^error: bits/final/model.safetensors: CRC32C' "${eval[@]}"
echo '{"mine": 1}' > bits/final/manifest.json
expect a_manifest_of_others 0 perplexity "${eval[@]}"
# ---- scripts/quickstart.sh ----------------------------------------------------------------------------------
mkdir -p tree/scripts tree/data/demo && cp "$root/scripts/quickstart.sh" tree/scripts && touch tree/data/demo/dataset.json
printf 'all:\n' > tree/Makefile
printf '#!/bin/sh\n' > tree/scripts/setup.sh && touch tree/scripts/report.py
printf '#!/bin/sh\necho "asked: $*"\n' > tree/train_llama
chmod +x tree/train_llama tree/scripts/*
expect quickstart_starts_over 0 '^asked: .* --overwrite .*--steps 9$' tree/scripts/quickstart.sh --steps 9
expect quickstart_resumes 0 '^asked: .*--resume --steps 9$' tree/scripts/quickstart.sh --resume --steps 9
lacks quickstart_resume_does_not_overwrite '--overwrite' out.txt
# ---- descriptors inherited at the start --------------------------------------------------------------------
"${run[@]}" --out closed --steps 2 --lr 1e30 --grad-clip 0 --warmup-steps 0 --steps 12 <&- >&- 2>&-
check closed_descriptors_run test $? -eq 7
check_python output_does_not_go_into_files_of_the_run <<< 'assert log("closed") and open("closed/.lock").read().count("\n") == 1'
# ---- the directory and its disk -------------------------------------------------------------------------------
on_a_small_disk() { unshare -m sh -c 'mount -t tmpfs -o size=128k tmpfs little && exec "$@"' sh "$@"; }
mkdir little
if on_a_small_disk true 2> /dev/null; then
    outcome too_little_space 4 '^error: little: expected 0\.2 MiB free .*, found 0\.1 MiB' \
        on_a_small_disk "${run[@]}" --out little --steps 2
    lacks too_little_space_stops_at_the_start '^step' out.txt
else skip too_little_space 'mounting a tmpfs needs root'; fi
start_long "${run[@]}" --out s --steps 1000000
mv s s.aside && mkdir s
end_long TERM
check replaced_directory eval "[ $status -eq 4 ] && grep '^error: s: ' out.txt"
check nothing_is_written_to_the_replacement test -z "$(ls -A s)"
start_long "${run[@]}" --out gone --steps 1000000
rm -r gone
end_long TERM
check removed_directory test $status -eq 4 -a ! -e gone
strace -o trace.txt -e trace=none true 2> /dev/null || { skip no_locks 'strace does not work here' && finish; }
# under strace a leak check does not work
ASAN_OPTIONS=detect_leaks=0 expect no_locks 0 '^warning: nolock: ' \
    strace -f -o trace.txt -e trace=flock -e inject=flock:error=ENOLCK "${run[@]}" --out nolock --steps 1
check no_locks_gives_one_warning test "$(grep -ac '^warning: ' out.txt)" -eq 1
finish
