// The planted bugs: each kernel takes one as an argument and is right with NO_BUG.
#pragma once

enum Bug {
    NO_BUG,
    // rmsnorm.cuh
    RMSNORM_NO_BARRIER,         // partial sums are read without a barrier after their writing
    RMSNORM_DIVERGENT_BARRIER,  // one warp does not reach the barrier
    RMSNORM_READS_PAST_ROW,     // one vector past the row, for the last one past the tensor
    // copies.cuh
    COPIES_EARLY_REFILL,     // no barrier before a buffer that others still read is refilled
    COPIES_WAIT_TOO_LITTLE,  // one group of cp.async too few
    COPIES_NO_ROW_GUARD,     // copies rows past the end of the tensor
    COPIES_NO_BARRIER,       // waits for its own copies only
    // gemm.cuh
    GEMM_IGNORES_EMPTY,          // the producer refills a stage that may still be read
    GEMM_WRONG_BYTE_COUNT,       // expects more bytes than TMA delivers
    GEMM_EARLY_RELEASE,          // releases a stage before its wgmma is done
    GEMM_NO_WGMMA_FENCE,         // accumulators are handed to wgmma without a fence
    GEMM_NO_PROXY_FENCE,         // TMA stores what it may not see yet
    GEMM_ONE_PROXY_FENCE,        // one thread of each warp fences for all
    GEMM_TOO_MANY_REGISTERS,     // more than the producer gives up
    GEMM_EXITS_EARLY,            // exits while a TMA store still reads shared memory
    GEMM_NO_INIT_FENCE,          // TMA may not see that its barrier is initialised
    GEMM_ONE_ARRIVAL_PER_GROUP,  // one thread releases the stage for all four warps
};
