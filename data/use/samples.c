#include "samples.h"

#include <string.h>

#include "../base/memory.h"

enum { MAX_BEGINNING = 16 };  // tokens of a document that begin a text

// Adds the first tokens of a document, or a chat up to its first answer: at most half of
// max_seqlen.
static bool add_document(TextWriter *w, Dataset *documents, int64_t doc, Error *err) {
    const int64_t half = w->o->max_seqlen > 1 ? w->o->max_seqlen / 2 : 1,
                  length = dataset_doc_length(documents, doc), end = half < length ? half : length;
    int64_t most = end < MAX_BEGINNING ? end : MAX_BEGINNING;
    while (most < end && dataset_count_targets(documents, doc, 1, most) == 0) most++;
    return dataset_read(documents, doc, 0, most, text_add(w, (int32_t)most)->tokens, err);
}

static bool add_samples_of_prompt(TextWriter *w, Error *err) {
    if (!w->printer.tokenizer)
        return error_set(err, EXIT_USAGE,
                         "leave it out, or put tokenizer.json into the directory of --model or "
                         "--train",
                         "--prompt needs a tokenizer, and there is none");
    if (!text_append(w, text_add(w, 0), w->o->prompt, err)) return false;
    while (w->num_texts < w->o->num_samples) {
        const Text *text = text_add(w, w->texts[0].length);
        memcpy(text->tokens, w->texts[0].tokens, (size_t)text->length * sizeof(int32_t));
    }
    return true;
}

bool samples_open(TextWriter *w, const Options *o, Data *data, Error *err) {
    Dataset *documents = data->has_val ? &data->val : &data->train;
    *w = (TextWriter){.o = o, .printer.tokenizer = data->has_tokenizer ? &data->tokenizer : NULL};
    if (o->prompt && o->num_samples > 0) return add_samples_of_prompt(w, err);
    for (int i = 0; i < o->num_samples; i++)
        if (!add_document(w, documents, i % documents->num_docs, err)) return false;
    return true;
}

static void text_report(const Text *text, const Tokenizer *tokenizer, int64_t step, RunLog *log) {
    AUTO_FREE char *chars = NULL;
    size_t n = 0;
    TextPrinter printer = {.to = host_stream(&chars, &n, "a sample"), .tokenizer = tokenizer};
    text_print(&printer, text->tokens, text->length, true);
    fclose(printer.to);
    if (chars) report_sample(log, step, text->number + 1, text->ended, chars);
}

void samples_report(TextWriter *w, ModelFace model, int64_t step, RunLog *log) {
    Text *texts = w->texts;
    if (w->num_texts == 0) return;
    for (int i = 0; i < w->num_texts; i++) text_begin_again(&texts[i], texts[i].prompt_length);
    texts_write(w, model, step);
    for (int i = 0; i < w->num_texts; i++) text_report(&texts[i], w->printer.tokenizer, step, log);
}
