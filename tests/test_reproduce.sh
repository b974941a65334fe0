#!/usr/bin/env bash
# scripts/reproduce_*.sh on the demo model and small sizes: each prints the published figure, ours and
# what differs, counts exactly, records when asked, and fails where the layouts disagree.
. "$(dirname "$0")/lib.sh"
scratch reproduce
export TRAIN=${TRAIN:-$root/build/cpu/train_llama} RESULTS=$work/results MODEL=demo
mkdir "$RESULTS"
cd "$root" || exit 1

repad=(scripts/reproduce_repad.sh --row 352 --full-rows 1 --repeats 1)
scores=(scripts/reproduce_scores.sh --docs 16 --length 16 --repeats 2)
record() { echo "$RESULTS/$1-cpu-$(date +%Y-%m-%d).txt"; }
three_answers() {       # three_answers NAME FILE: as many published figures as ours and differences
    for word in published ours differs; do has "$1_says_$word" "^$word +[^ ]" "$2"; done
}

expect repad 0 '^ours +demo, rows of 352: repad ' "${repad[@]}"
three_answers repad "$work/out.txt"
for layout in padded repad packed; do
    has "repad_times_$layout" "^$layout +[0-9.]+ \[.*x +[0-9]+ +[0-9.]+$" "$work/out.txt"
done
has repad_counts_padding '^the published documents in rows of 352: 1395 real tokens in 2112 ' "$work/out.txt"
has repad_counts_pairs '^packed .*x +178399 ' "$work/out.txt"
has repad_fills_a_batch '^a filled batch of 1 rows of 352: 352 real tokens in 352 \(100.0 % full\)' "$work/out.txt"
has repad_times_gather_and_scatter '^  backward [0-9.]+ ms a layer, .* in all 6' "$work/out.txt"
check nothing_is_recorded_unasked test -z "$(ls "$RESULTS")"

expect independence 0 'packed against alone 0 +.bit for bit' scripts/reproduce_independence.sh --record
three_answers independence "$work/out.txt"
has independence_on_the_figures '^max .ours - printed. +0.0078; 21 of 24 equal' "$work/out.txt"
has independence_of_a_model 'six documents' "$work/out.txt"
for word in date machine unpad.c command; do
    has "a_record_has_its_$word" "^$word +[^ ]" "$(record independence-demo)"
done
grep -v '^wrote ' "$work/out.txt" > "$work/printed.txt"
same a_record_is_what_was_printed "$work/printed.txt" "$(record independence-demo)"

# rows of 8 documents: exactly 8 times the squares; 2 * (128 * 129 / 2) causal pairs
expect scores 0 '^rows +128 +2 +32768 +8.0x +16512 +7.588x ' env RECORD=1 "${scores[@]}"
three_answers scores "$work/out.txt"
has scores_packed '^packed +16 +- +4096 +1.0x +2176 +1.000x ' "$(record scores-demo)"
has scores_padded '^padded +64 +16 +65536 +16.0x +33280 ' "$(record scores-demo)"
has scores_exactly_8 ' 8.000x, counted in squares' "$(record scores-demo)"
has scores_of_d24 'short windows of +512: attention +5.6 %, saved +1.8 %' "$(record scores-demo)"

# The CUDA build takes the same commands
if [ -x build/emu/bench_repad ]; then
    outcome repad_on_cuda 0 '^  backward [0-9.]+ ms a layer, .* in all 6' env TRAIN=build/emu/train_llama \
        RECORD=1 scripts/reproduce_repad.sh --row 8 --full-rows 1 --repeats 1
    three_answers repad_on_cuda "$work/out.txt"
    check emulated_times_are_marked test -e "$RESULTS/repad-demo-emulated-$(date +%Y-%m-%d).txt"
else skip repad_on_cuda 'build/emu/bench_repad is not built'; fi

# A trainer whose repad layout has another loss, one that packs wrongly, and one that does not run
fake() {        # fake NAME SED_SCRIPT
    printf '#!/usr/bin/env bash\n"%s" "$@" | sed -e "%s"\nexit ${PIPESTATUS[0]}\n' "$TRAIN" "$2" > "$work/$1"
    chmod +x "$work/$1"
}
fake wrong_loss '/^repad /s/5[.]6/5.7/'
printf '#!/bin/sh\ncase "$*" in *--check-packing*) echo "error: packing" >&2; exit 11;; esac\nexec "%s" "$@"\n' \
    "$TRAIN" > "$work/wrong_packing"
chmod +x "$work/wrong_packing"
expect another_loss_fails 11 'error: losses of padded, repad and packed' \
    env TRAIN="$work/wrong_loss" "${repad[@]}"
outcome wrong_packing_fails 11 'error: packing' \
    env TRAIN="$work/wrong_packing" scripts/reproduce_independence.sh
outcome no_trainer_fails 1 'error: .*: not found' env TRAIN="$work/none" "${repad[@]}"
finish
