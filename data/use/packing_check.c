#include "packing_check.h"

#include <math.h>
#include <string.h>

#include "../base/file.h"
#include "../base/hash.h"
#include "../base/json.h"
#include "../base/memory.h"

// A NaN counts as infinite; fmax would drop it.
static void keep_larger(double *largest, double difference) {
    *largest = isnan(difference) ? INFINITY : fmax(*largest, fabs(difference));
}

static void compare(double *largest, const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++) keep_larger(largest, (double)a[i] - (double)b[i]);
}

// Documents that are trained as one
static int32_t group_of(const Batch *packed) { return packed->num_pairs > 0 ? 2 : 1; }

// Document d of the packed batch, or the pair from it on, as a batch of its own. Its targets are
// the next tokens, not those of the packed batch, which may be wrong; a mask and weights are taken
// over.
static void batch_alone(Batch *alone, const Batch *packed, int32_t d) {
    const int32_t first = packed->cu_seqlens[d], group = group_of(packed);
    DocView docs[2];
    for (int32_t i = 0; i < group; i++) {
        const int32_t at = packed->cu_seqlens[d + i], n = packed->cu_seqlens[d + i + 1] - at;
        docs[i] = (DocView){.tokens = packed->tokens + at,
                            .length = n,
                            .next_token = n ? packed->targets[at + n - 1] : -1,
                            .weights = packed->weights + at};
    }
    batch_pack(alone, docs, group);
    for (int32_t t = 0; packed->masked && t < alone->total_tokens; t++)
        if (packed->targets[first + t] < 0) alone->targets[t] = -1;
    alone->num_pairs = group - 1;
    array_grow(alone->pairs, &alone->pair_capacity, 1, "a batch");
    if (group == 2) alone->pairs[0] = packed->pairs[d / 2];
}

static void compare_grads(PackingDelta *delta, const float *packed, const float *alone, size_t n) {
    double error2 = 0, norm2 = 0;
    for (size_t i = 0; i < n; i++) {
        const double difference = (double)packed[i] - (double)alone[i];
        keep_larger(&delta->grad, difference);
        error2 += difference * difference;
        norm2 += (double)alone[i] * (double)alone[i];
    }
    delta->grad_error = sqrt(error2 / (norm2 > 0 ? norm2 : 1));
    delta->grad_norm = sqrt(norm2);
}

PackingDelta packing_check(ModelFace m, const Batch *batch, const Batch *docs,
                           float *losses_alone) {
    const int32_t group = group_of(docs), most_alone = group * docs->max_seqlen;
    const size_t T = (size_t)batch->total_tokens, most = T + (size_t)most_alone;
    const int64_t V = m.vocab_size;
    AUTO_FREE float *logits = host_calloc(most * (size_t)V, sizeof(float), "logits"),
                    *losses = host_calloc(T, sizeof(float), "losses");
    float *logits_alone = logits + T * (size_t)V;
    AUTO_FREE float *grads = host_calloc(2 * m.num_grads, sizeof(float), "gradients");
    Batch alone;
    PackingDelta delta = {0};
    batch_init(&alone, most_alone, group);
    m.begin_step(m.model, docs->num_targets);
    m.pass(m.model, batch, true, losses, logits);
    m.get_grads(m.model, grads, 0, m.num_grads);
    m.begin_step(m.model, docs->num_targets);
    for (int32_t d = 0; d < docs->num_segments; d++) {
        const int32_t first = docs->cu_seqlens[d], rows = docs->cu_seqlens[d + 1] - first,
                      shared = batch->shared_len[d],
                      at = first - docs->cu_seqlens[d - d % group];  // in alone
        if (rows == 0) continue;
        if (d % group == 0) {
            batch_alone(&alone, docs, d);
            m.pass(m.model, &alone, true, losses_alone + first, logits_alone);
        }
        for (int32_t t = 0; t < rows; t++) {
            const int64_t row =
                t < shared ? batch->shared_first[d] + t : batch->cu_seqlens[d] + t - shared;
            // else it may be the target of another document: the gradient shows a wrong one
            if (alone.targets[at + t] >= 0)
                compare(&delta.loss, losses + row, losses_alone + first + t, 1);
            compare(&delta.logit, logits + row * V, logits_alone + (at + t) * V, V);
        }
    }
    m.get_grads(m.model, grads + m.num_grads, 0, m.num_grads);
    compare_grads(&delta, grads, grads + m.num_grads, m.num_grads);
    batch_free(&alone);
    return delta;
}

bool packing_is_rounding(const PackingDelta *d, bool bf16) {
    const double row_bound = bf16 ? 0x1p-4 : 1e-4, grad_bound = bf16 ? 0x1p-5 : 1e-5;
    return d->loss <= row_bound && d->logit <= row_bound && d->grad_error <= grad_bound;
}

// crcs (p.num) =  the CRC32C of each parameter's gradients, continued from its value before
static void grad_crcs(ModelFace m, Parameters p, uint32_t *crcs) {
    AUTO_FREE float *block = host_calloc(p.block, sizeof *block, "gradients");
    for (int i = 0; i < p.num; i++)
        for (size_t k = 0, n, count = p.list[i].count; k < count; k += n) {
            n = count - k < p.block ? count - k : p.block;
            m.get_grads(m.model, block, p.list[i].offset + k, n);
            crcs[i] = crc32c(crcs[i], block, n * sizeof *block);
        }
}

bool packing_replay(ModelFace m, Parameters p, const StepData *data, int64_t step, Error *err) {
    AUTO_FREE uint32_t *crcs = host_calloc(2 * (size_t)p.num, sizeof *crcs, "checksums");
    const Parameter *different = NULL;
    for (int pass = 0; pass < 2 && data->num_micro > 0; pass++) {
        m.begin_step(m.model, data->plan.weight_sum);
        for (int i = 0; i < data->num_micro; i++)
            m.pass(m.model, &data->micro[i], true, NULL, NULL);
        grad_crcs(m, p, crcs + pass * p.num);
    }
    for (int i = p.num - 1; i >= 0; i--)
        if (crcs[i] != crcs[p.num + i]) different = &p.list[i];
    return !different ||
           error_set(err, EXIT_DEVICE_ERROR,
                     "its memory, cores or GPU are faulty: continue with --resume on another one",
                     "rank %d, step %ld: expected gradients of %s with the same bits when this "
                     "machine computes them again, found others",
                     m.rank, step, different->name);
}

// Writes the kit that dev/referee.py holds another trainer to: the batch, and the results of its
// documents alone.
// Labels are as transformers takes them: a token's own id, or -100 where it is no target. A piece
// of a document ends with the token that follows it.
static bool write_kit(const char *path, const Batch *b, const float *losses, double grad_norm,
                      Error *err) {
    json_t *ids = json_array(), *labels = json_array(), *ends = json_array(), *sums = json_array();
    for (int32_t d = 0; d < b->num_segments; d++) {
        const int32_t first = b->cu_seqlens[d], end = b->cu_seqlens[d + 1];
        double sum = 0;
        if (first == end) continue;
        for (int32_t t = first; t < end + (b->targets[end - 1] >= 0); t++) {
            const int32_t id = t < end ? b->tokens[t] : b->targets[end - 1];
            const bool is_target = t > first && b->targets[t - 1] >= 0;
            json_array_append_new(ids, json_integer(id));
            json_array_append_new(labels, json_integer(is_target ? id : -100));
            sum += t < end ? (double)losses[t] : 0;
        }
        json_array_append_new(ends, json_integer((json_int_t)json_array_size(ids)));
        json_array_append_new(sums, json_real(sum));
    }
    AUTO_FREE char *text = json_write(
        json_pack("{s:s, s:o, s:o, s:o, s:o, s:f, s:f}", "format", "unpad.c packing kit 1",
                  "input_ids", ids, "labels", labels, "document_ends", ends, "loss_sums", sums,
                  "grad_norm", grad_norm, "neighbour_changes_loss_by", 0.0),
        0);
    return file_create(path, text, strlen(text), err);
}

bool packing_report(ModelFace m, const Batch *batch, const Batch *docs, bool bf16, const char *kit,
                    Error *err) {
    AUTO_FREE float *losses = host_calloc((size_t)docs->total_tokens, sizeof *losses, "losses");
    const PackingDelta delta = packing_check(m, batch, docs, losses), *d = &delta;
    const bool good = packing_is_rounding(d, bf16);
    if (kit[0] && !write_kit(kit, docs, losses, d->grad_norm, err)) return false;
    printf("\n%d documents, %d tokens, %s", docs->num_segments, docs->total_tokens,
           layout_name(batch->layout));
    if (batch->num_shared) printf(" in %d rows", batch->total_tokens);
    printf(" against each alone:\n");
    printf("  max |delta| of a token's loss  %.3g%s\n", d->loss,
           d->loss == 0 ? "  (bit for bit)" : "");
    printf("  max |delta| of a logit         %.3g%s\n", d->logit,
           d->logit == 0 ? "  (bit for bit)" : "");
    printf("  max |delta| of a gradient      %.3g, relative L2 %.3g\n", d->grad, d->grad_error);
    printf("%s\n", good ? "packing does not change the result" : "PACKING CHANGES THE RESULT");
    if (good) return true;
    return error_set(err, EXIT_DEVICE_ERROR,
                     "if the model's own losses are finite, a kernel is wrong: please report it",
                     "packing: expected the result of each document alone, found another one");
}
