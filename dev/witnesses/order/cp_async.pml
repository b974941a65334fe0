/* The two stages of the kernels in kernels/cuda/attention_sm80.cu: every warp copies a part of each
 * tile with cp.async and stores a part of its statistics itself (backward_kv), waits for its own
 * copies, meets the others at __syncthreads, starts the copies of the next tile and computes. */
#ifndef WARPS
#define WARPS 3
#endif
#ifndef BLOCKS
#define BLOCKS 4
#endif
#define PLACE(j) ((j) % 2 * WARPS)

byte tile[2 * WARPS], coming[2 * WARPS], statistics[2 * WARPS]; /* by stage and warp */
byte arrived;
bit generation;

inline syncthreads() {
    atomic {
        own = generation;
        arrived++;
        if
        :: arrived == WARPS -> arrived = 0; generation = 1 - generation
        :: else
        fi
    };
    generation != own
}

#define copy(j) \
    assert(coming[PLACE(j) + w] == 0); \
    coming[PLACE(j) + w] = (j) + 1

/* All parts of tile j lie there. */
#define IS_THERE(j) \
    for (part : 0 .. WARPS - 1) { \
        assert(tile[PLACE(j) + part] == (j) + 1 && statistics[PLACE(j) + part] == (j) + 1) \
    } \
    part = 0

proctype copies(byte w) {
end:
    do
    :: atomic { coming[w] != 0 -> tile[w] = coming[w]; coming[w] = 0 }
    :: atomic { coming[WARPS + w] != 0 -> tile[WARPS + w] = coming[WARPS + w]; coming[WARPS + w] = 0 }
    od
}

proctype warp(byte w) {
    byte j, part;
    bit own;
    atomic {
        copy(0);
        statistics[PLACE(0) + w] = 1
    };
    do
    :: j < BLOCKS ->
#ifndef NO_WAIT
        coming[PLACE(j) + w] == 0 && coming[PLACE(j + 1) + w] == 0; /* cp_async_wait<0> */
#endif
#ifdef COPY_BEFORE_BARRIER
        if
        :: j + 1 < BLOCKS -> atomic { copy(j + 1) }
        :: else
        fi;
#endif
#ifndef NO_BARRIER
        syncthreads();
#endif
#ifndef COPY_BEFORE_BARRIER
        if
        :: j + 1 < BLOCKS ->
#ifdef WRONG_STAGE
            atomic { copy(j + 2) }
#else
            atomic { copy(j + 1) }
#endif
        :: else
        fi;
#endif
        atomic { IS_THERE(j) };
        atomic { IS_THERE(j) };
        atomic {
            statistics[PLACE(j + 1) + w] = j + 2;
            j++
        }
    :: else -> break
    od
}

init {
    byte i;
    atomic {
        for (i : 0 .. WARPS - 1) {
            run copies(i);
            run warp(i)
        }
    }
}
