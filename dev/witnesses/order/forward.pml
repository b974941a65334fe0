/* The barriers of attention_forward_sm90_kernel (kernels/cuda/attention_sm90.cu): a producer, TMA,
 * and consumers, each warp by itself. Memory holds numbers of items and blocks. A warp asserts
 * that it finds the right one when a wgmma begins, and still when it ends. */
#include "mbarrier.h"

Mbarrier q_full[CONSUMERS], q_empty[CONSUMERS];
Mbarrier k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
byte q[CONSUMERS], k[STAGES], v[STAGES];
byte q_coming[CONSUMERS], k_coming[STAGES], v_coming[STAGES];

/* Item `number` has so many blocks of keys (0: no more items), of which a consumer has no use for
 * the first `skipped`; idle when these are all. */
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
    :: LAND(v, v_coming, v_full, 0)
#if STAGES > 1
    :: LAND(k, k_coming, k_full, 1)
    :: LAND(v, v_coming, v_full, 1)
#endif
#if STAGES > 2
    :: LAND(k, k_coming, k_full, 2)
    :: LAND(v, v_coming, v_full, 2)
#endif
    od
}

#define load_block(coming, filled, freed, r) \
    atomic { \
        AWAIT_FREED(freed, r); \
        arrive_expecting(filled[r.stage], 1); \
        ask(coming, r.stage, r.block); \
        advance(r) \
    }

proctype producer() {
    Ring keys, values;
    bit phase;
    byte number, blocks, i, skipped;
    start(keys);
    start(values);
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
        :: i <= blocks ->
            if
            :: i < blocks -> load_block(k_coming, k_full, k_empty, keys)
            :: else
            fi;
            if
            :: i > 0 -> load_block(v_coming, v_full, v_empty, values)
            :: else
            fi;
            i++
        :: else -> break
        od;
        phase = 1 - phase
    od
}

#define K_IS_THERE assert(q[c] == number && k[keys.stage] == keys.block)
#define V_IS_THERE assert(v[values.stage] == values.block)

proctype consumer(byte c, w) {
    Ring keys, values;
    bit phase;
    byte number = 1, left, blocks, skipped;
    start(keys);
    start(values);
    do
    :: atomic {
            wait(q_full[c], phase);
            assert(jobs[c].number == number);
            blocks = jobs[c].blocks;
            skipped = jobs[c].skipped;
            left = skipped;
            if
            :: blocks == 0 -> break
            :: blocks > 0 && skipped == blocks ->
                arrive(q_empty[c]);
#ifdef IDLE_DOES_NOT_SKIP
                left = 0
#endif
            :: else
            fi
        };
        do
        :: left > 0 ->
            atomic {
                AWAIT_FILLED(k_full, keys);
                done(k_empty, keys)
            };
            atomic {
                AWAIT_FILLED(v_full, values);
                done(v_empty, values);
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
            atomic {
                K_IS_THERE;
                done(k_empty, keys);
                left = blocks - skipped - 1
            };
            do
            :: left > 0 -> /* next_block */
                atomic {
                    AWAIT_FILLED(k_full, keys);
                    K_IS_THERE
#ifdef RELEASE_BEFORE_WGMMA_WAIT
                    ;
                    RELEASE(k_empty, keys)
#endif
                };
                atomic {
                    AWAIT_FILLED(v_full, values);
                    V_IS_THERE
                };
                atomic {
                    K_IS_THERE;
#ifdef RELEASE_BEFORE_WGMMA_WAIT
                    advance(keys)
#else
                    done(k_empty, keys)
#endif
                };
                atomic {
                    V_IS_THERE;
                    done(v_empty, values);
                    left--
                }
            :: else -> break
            od;
            atomic {
                arrive(q_empty[c]) /* last_values */
            };
            atomic {
                AWAIT_FILLED(v_full, values);
                V_IS_THERE
            };
            atomic {
                V_IS_THERE;
                done(v_empty, values)
            }
        :: else
        fi;
        atomic {
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
            init_barrier(k_empty[i], RING_COUNT);
            init_barrier(v_full[i], 1);
            init_barrier(v_empty[i], RING_COUNT)
        }
        run tma();
        run producer();
        for (i : 0 .. ALL_WARPS - 1) {
            run consumer(i / WARPS, i % WARPS)
        }
    }
}
