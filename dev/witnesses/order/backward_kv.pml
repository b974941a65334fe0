/* The barriers of attention_backward_kv_sm90_kernel (kernels/cuda/attention_backward_sm90.cu); see
 * forward.pml. K and V of all consumers are one pair; a stage of queries is filled by TMA and by
 * the warp of the statistics, and both arrive. */
#include "mbarrier.h"

Mbarrier k_full[1], k_empty[1], q_full[STAGES], q_empty[STAGES];
byte k[1], q[STAGES], statistics[STAGES];
byte k_coming[1], q_coming[STAGES];
byte job_number, job_blocks; /* of queries; consumers from `job_units` on are idle */
byte job_units;

#ifdef STATISTICS_NOT_COUNTED
#define Q_PRODUCERS 1
#else
#define Q_PRODUCERS 2
#endif
#ifdef UNIT_COUNT_TOO_SMALL /* the warp of the statistics is forgotten */
#define KV_COUNT ALL_WARPS
#else
#define KV_COUNT (ALL_WARPS + 1)
#endif

proctype tma() {
end:
    do
    :: LAND(k, k_coming, k_full, 0)
    :: LAND(q, q_coming, q_full, 0)
#if STAGES > 1
    :: LAND(q, q_coming, q_full, 1)
#endif
#if STAGES > 2
    :: LAND(q, q_coming, q_full, 2)
#endif
    od
}

proctype producer() {
    Ring queries;
    bit phase;
    byte number, blocks, i, units;
    start(queries);
    do
    :: atomic {
            number++;
            blocks = 0;
            if
            :: number <= ITEMS -> any_from_1(blocks, BLOCKS)
            :: else
            fi
        };
        atomic {
#ifndef NO_UNIT_WAIT
            wait(k_empty[0], 1 - phase);
#endif
            any_from_1(units, CONSUMERS);
            job_number = number;
            job_blocks = blocks;
            job_units = units;
            if
            :: blocks == 0 -> arrive_expecting(k_full[0], 0)
            :: else -> arrive_expecting(k_full[0], 1); ask(k_coming, 0, number)
            fi;
            units = 0;
            i = 0
        };
        if
        :: blocks == 0 -> break
        :: else
        fi;
        do
        :: i < blocks ->
            atomic {
                AWAIT_FREED(q_empty, queries);
                arrive_expecting(q_full[queries.stage], 1);
                ask(q_coming, queries.stage, queries.block);
                advance(queries);
                i++
            }
        :: else -> break
        od;
        phase = 1 - phase
    od
}

proctype statistics_warp() {
    Ring queries;
    bit phase;
    byte number = 1, left;
    start(queries);
    do
    :: atomic {
            wait(k_full[0], phase);
            assert(job_number == number);
            left = job_blocks;
            number++;
            arrive(k_empty[0]);
            if
            :: left == 0 -> break
            :: else
            fi
        };
        do
        :: left > 0 ->
            atomic {
#ifndef STATISTICS_DO_NOT_WAIT
                AWAIT_FREED(q_empty, queries);
#endif
                statistics[queries.stage] = queries.block
            };
            atomic {
                arrive(q_full[queries.stage]);
                advance(queries);
                left--
            }
        :: else -> break
        od;
        phase = 1 - phase
    od
}

#define ALL_IS_THERE \
    assert(k[0] == number && q[queries.stage] == queries.block); \
    assert(statistics[queries.stage] == queries.block)

proctype consumer(byte c, w) {
    Ring queries;
    bit phase;
    byte number = 1, left;
    bool idle;
    start(queries);
    do
    :: atomic {
            wait(k_full[0], phase);
            assert(job_number == number);
            left = job_blocks;
            idle = c >= job_units;
            if
            :: left == 0 -> break
            :: else
            fi
#ifdef IDLE_DOES_NOT_SKIP
            ;
            left = (idle -> 0 : left)
#endif
        };
        do
        :: left > 0 && idle ->
            atomic {
                AWAIT_FILLED(q_full, queries);
                done(q_empty, queries);
                left--
            }
        :: left > 0 && !idle ->
            atomic {
                AWAIT_FILLED(q_full, queries);
                ALL_IS_THERE
#ifdef RELEASE_BEFORE_WGMMA_WAIT
                ;
                RELEASE(q_empty, queries)
#endif
            };
            atomic {
                ALL_IS_THERE;
#ifdef RELEASE_BEFORE_WGMMA_WAIT
                advance(queries);
#else
                done(q_empty, queries);
#endif
                left--
            }
        :: else -> break
        od;
        atomic {
            assert(job_number == number); /* read again */
            arrive(k_empty[0]);
            phase = 1 - phase;
            number++
        }
    od
}

init {
    byte i;
    atomic {
        init_barrier(k_full[0], 1);
        init_barrier(k_empty[0], KV_COUNT);
        for (i : 0 .. STAGES - 1) {
            init_barrier(q_full[i], Q_PRODUCERS);
            init_barrier(q_empty[i], RING_COUNT)
        }
        run tma();
        run producer();
        run statistics_warp();
        for (i : 0 .. ALL_WARPS - 1) {
            run consumer(i / WARPS, i % WARPS)
        }
    }
}
