#include "samples.h"

#include <stdlib.h>
#include <string.h>

#include "../base/memory.h"

enum { MAX_BEGINNING = 16 };  // tokens of a document that begin a text

// The first tokens of a document: at most half of max_seqlen.
static bool add_document(Samples *s, Dataset *documents, int64_t doc, Error *err) {
    const Options *o = s->writer.o;
    const int32_t half = o->max_seqlen > 1 ? o->max_seqlen / 2 : 1;
    int64_t most = half < MAX_BEGINNING ? half : MAX_BEGINNING;
    if (most > dataset_doc_length(documents, doc)) most = dataset_doc_length(documents, doc);
    const Text *text = texts_add(&s->texts, o, (int32_t)most);
    return dataset_read(documents, doc, 0, most, text->tokens, err);
}

static bool add_samples_of_prompt(Samples *s, Error *err) {
    const Options *o = s->writer.o;
    if (!s->writer.printer.tokenizer)
        return error_set(err, EXIT_USAGE,
                         "leave it out, or put tokenizer.json into the directory of --model or "
                         "--train",
                         "--prompt needs a tokenizer, and there is none");
    Text *text = texts_add(&s->texts, o, 0);
    if (!text_append(text, o, s->writer.printer.tokenizer, o->prompt, err)) return false;
    while (s->texts.n < o->num_samples) {
        text = texts_add(&s->texts, o, s->texts.list[0].length);
        memcpy(text->tokens, s->texts.list[0].tokens, (size_t)text->length * sizeof(int32_t));
    }
    return true;
}

bool samples_open(Samples *s, const Options *o, Data *data, Error *err) {
    Dataset *documents = data->has_val ? &data->val : &data->train;
    *s = (Samples){.writer.o = o};
    if (data->has_tokenizer) s->writer.printer.tokenizer = &data->tokenizer;
    if (o->prompt && o->num_samples > 0) return add_samples_of_prompt(s, err);
    for (int i = 0; i < o->num_samples; i++)
        if (!add_document(s, documents, i % documents->num_docs, err)) return false;
    return true;
}

static void text_report(const Text *text, const Tokenizer *tokenizer, int64_t step, RunLog *log) {
    char *chars = NULL;
    size_t n = 0;
    TextPrinter printer = {.to = host_stream(&chars, &n, "a sample"), .tokenizer = tokenizer};
    text_print(&printer, text->tokens, text->length, true);
    fclose(printer.to);
    if (chars) report_sample(log, step, text->number + 1, text->ended, chars);
    free(chars);
}

void samples_report(Samples *s, ModelFace model, int64_t step, RunLog *log) {
    Text *texts = s->texts.list;
    const int n = s->texts.n;
    if (n == 0) return;
    for (int i = 0; i < n; i++) text_begin_again(&texts[i], texts[i].prompt_length);
    texts_write(&s->writer, &s->texts, model, step);
    for (int i = 0; i < n; i++) text_report(&texts[i], s->writer.printer.tokenizer, step, log);
}
