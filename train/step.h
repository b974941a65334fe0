// One optimizer step, and the loss over a fixed set of documents: micro-batches through the model.
#ifndef UNPAD_STEP_H
#define UNPAD_STEP_H

#include <stdint.h>
#include <time.h>

#include "../data/base/sum_tree.h"
#include "../data/batches/batch.h"
#include "../data/batches/loader.h"
#include "../llama.h"        // defines: LlamaModel, forward, backward, update
#include "graph.h"           // defines: PassGraph
#include "reduce.h"          // defines: llama_end_leaf, llama_reduce_grads

static inline double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static inline void train_micro_batch(LlamaModel *m, const Batch *b, PassGraph *graph) {
    comm_phase("forward", -1);
    llama_set_batch(m, b);
    pass_through(m, graph);
    llama_add_losses(m);
}

// Gradients of this rank's micro-batches, leaf by leaf of the tree that fixes the order of the sum.
static inline void train_leaves(LlamaModel *m, const StepData *data, PassGraph *graph) {
    const LlamaRanks *ranks = &m->ranks;
    int32_t first, last, i = 0;
    plan_block(ranks->num_leaves, ranks->rank, ranks->num_ranks, &first, &last);
    for (int32_t leaf = first; leaf < last; leaf++) {
        llama_loss_part(m, leaf);
        while (i < data->num_micro &&
               plan_leaf(data->own_micros[i], data->plan.num_micro, ranks->num_leaves) == leaf)
            train_micro_batch(m, &data->micro[i++], graph);
        llama_end_leaf(m, leaf, leaf + 1 == last);
    }
}

// The whole step; waits for it, once, at the end. device_timer_ms is the time of its micro-batches.
static inline StepScalars train_step(LlamaModel *m, const StepData *data, AdamW hyper,
                                     float grad_clip, PassGraph *graph) {
    comm_phase("forward", hyper.t);
    llama_zero_grads(m, data->num_targets);
    device_timer_start();
    if (m->ranks.in_order)
        train_leaves(m, data, graph);
    else
        for (int i = 0; i < data->num_micro; i++) {
            // a graph is one launch: no gradient leaves before its end
            if (i + 1 == data->num_micro && graph->num_docs == 0) llama_last_micro_batch(m);
            train_micro_batch(m, &data->micro[i], graph);
        }
    device_timer_stop();
    comm_phase("reduce", -1);
    llama_reduce_grads(m);
    comm_phase("update", -1);
    llama_update(m, hyper, grad_clip);
    return llama_read_step(m);
}

// Validation is shared out as well: each micro-batch is one part of the sum.
static inline double validation_loss(LlamaModel *m, const StepData *data) {
    llama_zero_sums(m);
    for (int i = 0; i < data->num_micro; i++) {
        comm_phase("validate", -1);
        llama_loss_part(m, data->own_micros[i]);
        llama_set_batch(m, &data->micro[i]);
        llama_forward(m);
        llama_head_eval(m);
    }
    llama_sum_losses(m);
    return llama_read_step(m).loss_sum / (double)data->num_targets;
}

#endif
