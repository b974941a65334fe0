#!/usr/bin/env bash
# The barriers of the attention kernels as SPIN models (dev/witnesses/order): every interleaving of
# the models as they stand is without deadlock and without a read of what is not there, and SPIN
# finds each planted fault.
# usage: dev/witnesses/order.sh > dev/witnesses/order.txt      needs spin and a C compiler
set -u
models=$(cd "$(dirname "$0")/order" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/unpad-order-XXXXXX") && trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
wrong=0

# search MODEL DEFINES...: sets $states and $errors, and of an error $why
search() {
    local model=$1
    shift
    rm -f pan*
    cp "$models"/* . && spin "$@" -a "$model.pml" > log.txt 2>&1 &&
        cc -O2 -w -DSAFETY -DCOLLAPSE -DVECTORSZ=2048 pan.c -o pan >> log.txt 2>&1 &&
        ./pan -m1000000 -n > log.txt 2>&1 || { cat log.txt >&2; exit 1; }
    if grep -qE 'max search depth|out of memory' log.txt; then cat log.txt >&2 && exit 1; fi
    states=$(sed -n 's/^ *\([0-9]*\) states, stored.*/\1/p' log.txt)
    errors=$(sed -n 's/.*errors: \([0-9]*\).*/\1/p' log.txt)
    why=$(sed -n 's/^pan:1: \([^(]*\) *(.*/\1/p' log.txt | sed 's/ *$//')
    case $why in
        'invalid end state') why=deadlock ;;
        'assertion violated'*)
            why=$(sed -n 's/^pan:1: assertion violated \(.*\) (at depth.*/assertion \1/p' log.txt) ;;
    esac
}
holds() {       # holds MODEL DEFINES...
    search "$@"
    [ "$errors" = 0 ] || wrong=1
    echo "$*: $states states, $errors errors${why:+, $why}"
}
found() {       # found MODEL DEFINES...: the last one is the fault
    search "$@"
    [ "$errors" = 1 ] || { wrong=1 && why='NOT FOUND'; }
    echo "$*: $why"
}

echo "# Written by dev/witnesses/order.sh with $(spin -V | sed 's/ --.*//'); checked by" \
    "tests/test_witnesses.sh."
echo "# models $(cat "$models"/* | cksum)"
echo "# every interleaving"
holds forward -DWARPS=1 -DITEMS=2 -DBLOCKS=3
holds forward -DWARPS=1 -DITEMS=1 -DBLOCKS=4 -DSTAGES=3
holds forward -DWARPS=2 -DITEMS=1 -DBLOCKS=2
holds backward_q -DWARPS=1 -DITEMS=2 -DBLOCKS=4
holds backward_q -DWARPS=1 -DITEMS=2 -DBLOCKS=4 -DSTAGES=3
holds backward_q -DWARPS=2 -DITEMS=2 -DBLOCKS=2
holds backward_kv -DWARPS=1 -DITEMS=2 -DBLOCKS=4
holds backward_kv -DWARPS=1 -DITEMS=2 -DBLOCKS=4 -DSTAGES=3
holds backward_kv -DWARPS=2 -DITEMS=2 -DBLOCKS=2
holds cp_async
echo "# planted faults, and how they show"
for model in forward backward_q backward_kv; do
    for fault in NO_EMPTY_WAIT NO_FULL_WAIT PRODUCER_PARITY CONSUMER_PARITY WRONG_STAGE \
        NO_UNIT_WAIT IDLE_DOES_NOT_SKIP; do
        found $model -DWARPS=1 -DBLOCKS=3 -D$fault
    done
    # the stage is filled again within an item, by the block after the next
    found $model -DWARPS=1 -DITEMS=1 -DBLOCKS=4 -DRELEASE_BEFORE_WGMMA_WAIT
    for fault in ONE_WARP_RELEASES COUNT_OF_GROUPS UNIT_COUNT_TOO_SMALL; do
        found $model -DWARPS=2 -DBLOCKS=3 -D$fault
    done
done
found backward_q -DWARPS=1 -DSTAGES=1
found backward_kv -DWARPS=1 -DSTATISTICS_NOT_COUNTED
found backward_kv -DWARPS=1 -DSTATISTICS_DO_NOT_WAIT
for fault in NO_WAIT NO_BARRIER COPY_BEFORE_BARRIER WRONG_STAGE; do found cp_async -D$fault; done
exit $wrong
