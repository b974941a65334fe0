// A micro-batch through the model: forward, loss, backward. As a graph it costs the host one launch
// instead of hundreds; the graph is recorded once and serves every micro-batch of its size,
// whatever the documents. Micro-batches of another size go through without it.
#ifndef UNPAD_GRAPH_H
#define UNPAD_GRAPH_H

#include "../llama.h"  // defines: LlamaModel, forward, backward

// What has been recorded, and how often it served. All 0: never a graph.
typedef struct {
    int32_t total_tokens, num_docs;  // of the micro-batches that it is for
    // one has gone through: kernels are loaded, and matmul has chosen
    bool passed;
    DeviceGraph *graph;
    int64_t num_passes, num_launches;
} PassGraph;

static inline void pass_without_graph(LlamaModel *m) {
    llama_forward(m);
    llama_head_train(m);
    comm_phase("backward", -1);
    llama_backward(m);
}

// The model's current micro-batch; losses are left for llama_add_losses.
static inline void pass_through(LlamaModel *m, PassGraph *g) {
    const Documents *docs = &m->in.docs;
    const bool of_its_size = g->num_docs > 0 && docs->num_docs == g->num_docs &&
                             docs->total_tokens == g->total_tokens && m->in.num_real_rows == 0;
    g->num_passes++;
    if (!of_its_size || !g->passed) {
        pass_without_graph(m);
        g->passed = g->passed || of_its_size;
        return;
    }
    llama_await_all_weights(m);  // not in a graph: other ranks send them once a step
    if (!g->graph) {
        device_graph_begin();
        pass_without_graph(m);
        g->graph = device_graph_end();
    }
    device_graph_launch(g->graph);
    g->num_launches++;
}

static inline void pass_graph_free(PassGraph *g) {
    if (g->graph) device_graph_free(g->graph);
    g->graph = NULL;
}

#endif
