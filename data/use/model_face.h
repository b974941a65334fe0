// The functions of a model that data/use calls. llama.h, which stands above, provides them.
#pragma once

#include "../batches/loader.h"
#include "../models/config.h"

typedef struct LlamaModel LlamaModel;  // nothing here looks inside

// A packed batch has T rows; V is vocab_size.
typedef struct {
    LlamaModel *model;
    int32_t rank, num_ranks;
    int32_t vocab_size;
    const TokenIds *text_ends;  // each of them ends a text
    int32_t cache_tokens;       // of texts that grow together; a batch holds as many
    int32_t max_rows;           // of one call of next_logits
    size_t num_grads;

    // logits (n, V) =  logits of rows (n, never falling); keeps the keys and values of the batch
    void (*next_logits)(LlamaModel *model, const Batch *batch, const int32_t *rows, int32_t n,
                        float *logits);
    // zeroes the gradients; losses are divided by weight_sum
    void (*begin_step)(LlamaModel *model, double weight_sum);
    // losses (T) =, 0 where there is no target, and logits (T, V) =, if not NULL. train: adds the
    // batch's gradients to the model's
    void (*pass)(LlamaModel *model, const Batch *batch, bool train, float *losses, float *logits);
    // the sums of losses (plan.num_segments) of the documents of a step, on every rank
    const double *(*document_losses)(LlamaModel *model, const StepData *data);
    // grads (n) =  those from `first` on
    void (*get_grads)(LlamaModel *model, float *grads, size_t first, size_t n);
    // out (num_ranks, bytes) =  the data (bytes) of every rank
    void (*gather)(void *out, const void *data, size_t bytes);
} ModelFace;
