/* The barriers of attention_backward_q_sm90_kernel (kernels/cuda/attention_backward_sm90.cu); see
 * forward.pml. K and V are one stage; a stage is read by two products in a row, the second of them
 * beside the next stage. */
#include "mbarrier.h"

Mbarrier q_full[CONSUMERS], q_empty[CONSUMERS], k_full[STAGES], k_empty[STAGES];
byte q[CONSUMERS], k[STAGES];
byte q_coming[CONSUMERS], k_coming[STAGES];

typedef Job {
    byte number;
    byte blocks;
    byte skipped
};
Job jobs[CONSUMERS];

proctype tma() {
end:
    do
    :: LAND(q, q_coming, q_full, 0)
    :: LAND(q, q_coming, q_full, 1)
    :: LAND(k, k_coming, k_full, 0)
#if STAGES > 1
    :: LAND(k, k_coming, k_full, 1)
#endif
#if STAGES > 2
    :: LAND(k, k_coming, k_full, 2)
#endif
    od
}

proctype producer() {
    Ring keys;
    bit phase;
    byte number, blocks, i, skipped;
    start(keys);
    do
    :: atomic {
            number++;
            blocks = 0;
            if
            :: number <= ITEMS -> any_from_1(blocks, BLOCKS)
            :: else
            fi;
            i = 0
        };
        do
        :: i < CONSUMERS ->
            atomic {
#ifndef NO_UNIT_WAIT
                wait(q_empty[i], 1 - phase);
#endif
                any_from_0(skipped, blocks);
                jobs[i].number = number;
                jobs[i].blocks = blocks;
                jobs[i].skipped = skipped;
                if
                :: skipped == blocks -> arrive_expecting(q_full[i], 0)
                :: else -> arrive_expecting(q_full[i], 1); ask(q_coming, i, number)
                fi;
                skipped = 0;
                i++
            }
        :: else -> break
        od;
        if
        :: blocks == 0 -> break
        :: else -> i = 0
        fi;
        do
        :: i < blocks ->
            atomic {
                AWAIT_FREED(k_empty, keys);
                arrive_expecting(k_full[keys.stage], 1);
                ask(k_coming, keys.stage, keys.block);
                advance(keys);
                i++
            }
        :: else -> break
        od;
        phase = 1 - phase
    od
}

#define K_IS_THERE assert(q[c] == number && k[keys.stage] == keys.block)
#define following_stage ((keys.stage + 1) % STAGES)
#define NEXT_K_IS_THERE assert(q[c] == number && k[following_stage] == keys.block + 1)
#ifdef CONSUMER_PARITY
#define AWAIT_FOLLOWING wait(k_full[following_stage], keys.phase)
#else
#define AWAIT_FOLLOWING \
    wait(k_full[following_stage], (keys.stage + 1 == STAGES -> 1 - keys.phase : keys.phase))
#endif

proctype consumer(byte c, w) {
    Ring keys;
    bit phase;
    byte number = 1, left, blocks, skipped;
    start(keys);
    do
    :: atomic {
            wait(q_full[c], phase);
            assert(jobs[c].number == number);
            blocks = jobs[c].blocks;
            skipped = jobs[c].skipped;
            left = skipped;
            if
            :: blocks == 0 -> break
            :: else
            fi
#ifdef IDLE_DOES_NOT_SKIP
            ;
            if
            :: skipped == blocks -> left = 0
            :: else
            fi
#endif
        };
        do
        :: left > 0 ->
            atomic {
                AWAIT_FILLED(k_full, keys);
                done(k_empty, keys);
                left--
            }
        :: else -> break
        od;
        if
        :: skipped < blocks ->
            atomic { /* first_block */
                AWAIT_FILLED(k_full, keys);
                K_IS_THERE
            };
            left = blocks - skipped - 1;
            do
            :: left > 0 -> /* next_block */
                atomic {
                    AWAIT_FOLLOWING;
                    K_IS_THERE;
                    NEXT_K_IS_THERE
#ifdef RELEASE_BEFORE_WGMMA_WAIT
                    ;
                    RELEASE(k_empty, keys)
#endif
                };
                atomic {
                    K_IS_THERE;
                    NEXT_K_IS_THERE;
#ifdef RELEASE_BEFORE_WGMMA_WAIT
                    advance(keys);
#else
                    done(k_empty, keys);
#endif
                    left--
                }
            :: else -> break
            od;
            atomic {
                K_IS_THERE;
                done(k_empty, keys)
            }
        :: else
        fi;
        atomic {
            arrive(q_empty[c]);
            phase = 1 - phase;
            blocks = 0;
            skipped = 0;
            number++
        }
    od
}

init {
    byte i;
    atomic {
        for (i : 0 .. CONSUMERS - 1) {
            init_barrier(q_full[i], 1);
            init_barrier(q_empty[i], UNIT_COUNT)
        }
        for (i : 0 .. STAGES - 1) {
            init_barrier(k_full[i], 1);
            init_barrier(k_empty[i], RING_COUNT)
        }
        run tma();
        run producer();
        for (i : 0 .. ALL_WARPS - 1) {
            run consumer(i / WARPS, i % WARPS)
        }
    }
}
