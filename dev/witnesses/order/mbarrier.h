/* Included by the models: what an mbarrier is, and memory that is filled in the background. The
 * models put into an atomic what others cannot tell apart: a wait and what follows at once, what
 * precedes an arrival and the arrival. */

#ifndef CONSUMERS
#define CONSUMERS 2 /* warpgroups */
#endif
#ifndef WARPS
#define WARPS 2 /* of a consumer */
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef ITEMS
#define ITEMS 2 /* at most */
#endif
#ifndef BLOCKS
#define BLOCKS 3 /* of an item, at most */
#endif
#define ALL_WARPS (CONSUMERS * WARPS)

/* A phase ends when `count` arrivals and all announced loads have come. */
typedef Mbarrier {
    byte count;
    byte pending;
    byte loads;
    bit phase
};
#define init_barrier(b, n) b.count = n; b.pending = n
inline end_phase(b) {
    if
    :: b.pending == 0 && b.loads == 0 -> b.phase = 1 - b.phase; b.pending = b.count
    :: else
    fi
}
inline arrive(b) {
    assert(b.pending > 0); /* else more arrivals than its count */
    b.pending--;
    end_phase(b)
}
inline arrive_expecting(b, n) {
    b.loads = b.loads + n;
    arrive(b)
}
#define wait(b, parity) (b.phase != (parity))

/* TMA brings what was asked for into slot i, at any later moment. */
#define LAND(memory, coming, filled, i) \
    atomic { coming[i] != 0 -> memory[i] = coming[i]; coming[i] = 0; filled[i].loads--; end_phase(filled[i]) }
#define ask(coming, i, number) \
    assert(coming[i] == 0); \
    coming[i] = number

/* Stage and phase, as struct Ring counts them, and the number of the block that the stage has to
 * hold: which one in all, from 1 */
typedef Ring {
    byte stage;
    bit phase;
    byte block
};
inline start(r) { r.block = 1 }
inline advance(r) {
    r.block++;
    r.stage++;
    if
    :: r.stage == STAGES -> r.stage = 0; r.phase = 1 - r.phase
    :: else
    fi
}

/* Planted faults. A model without any is the kernel's. */
#ifdef NO_EMPTY_WAIT
#define AWAIT_FREED(freed, r) skip
#elif defined(PRODUCER_PARITY)
#define AWAIT_FREED(freed, r) wait(freed[r.stage], r.phase)
#else
#define AWAIT_FREED(freed, r) wait(freed[r.stage], 1 - r.phase)
#endif
#ifdef NO_FULL_WAIT
#define AWAIT_FILLED(filled, r) skip
#elif defined(CONSUMER_PARITY)
#define AWAIT_FILLED(filled, r) wait(filled[r.stage], 1 - r.phase)
#else
#define AWAIT_FILLED(filled, r) wait(filled[r.stage], r.phase)
#endif
#ifdef WRONG_STAGE
#define RELEASE(freed, r) arrive(freed[(r.stage + 1) % STAGES])
#elif defined(ONE_WARP_RELEASES)
#define RELEASE(freed, r) if :: w == 0 -> arrive(freed[r.stage]) :: else fi
#else
#define RELEASE(freed, r) arrive(freed[r.stage])
#endif
#ifdef COUNT_OF_GROUPS /* instead of warps */
#define RING_COUNT CONSUMERS
#else
#define RING_COUNT ALL_WARPS
#endif
#ifdef UNIT_COUNT_TOO_SMALL
#define UNIT_COUNT (WARPS - 1)
#else
#define UNIT_COUNT WARPS
#endif

/* A stage is read no more. */
#define done(freed, r) RELEASE(freed, r); advance(r)

/* A number that is any of those from 0, or 1, to most */
#define any_from_0(x, most) x = 0; do :: x < most -> x++ :: break od
#define any_from_1(x, most) x = 1; do :: x < most -> x++ :: break od
